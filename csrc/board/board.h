/* Shared memory of ranks on one host. Each rank has a board of its own, on which it posts messages;
 * all others read them, and nobody else writes there.
 *
 * A message is for all other ranks, and they read messages in the order in which they were posted,
 * one of each rank at a time. Its memory is used again when all have read it. So a board is full
 * only while others have not come as far as its owner, and whoever waits for room has to go on
 * reading, or two that wait for one another's would wait for ever.
 *
 * The memory has no name in any file system, and goes with its last user, however that ends. The
 * others find it by the process and the number of a file that it has open (`fcb_offer`); a token
 * says that they found the right one. While a rank lives it holds a lock on its file, which the
 * system lets go with the process: that is how the others know.
 *
 * An fcb_board is one rank's end: of its own memory and its maps of the others'. One thread at a
 * time uses it; but any may sleep (fcb_sleep, with fcb_news) beside that one. What the others write
 * is not believed: places and lengths are checked before they are used. */
#ifndef FSDP_C_BOARD_BOARD_H
#define FSDP_C_BOARD_BOARD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Where the others find a board: numbers, to be sent to them. A process of 0: there is none. */
typedef struct fcb_offer {
    int64_t process;
    int64_t file;
    int64_t token;
} fcb_offer;

typedef struct fcb_board fcb_board;

/* What one rank has posted: `bytes` of them, at `data` until fcb_read. */
typedef struct fcb_message {
    uint32_t kind;
    size_t bytes;
    const char *data;
} fcb_message;

enum { FCB_RANKS = 64 }; /* at most */

/* A board of this process, not yet known to others, with `room` bytes for messages, or somewhat
 * fewer where that is no multiple of 64. NULL: the system has no such memory, or has none left. */
fcb_board *fcb_open(size_t room);
fcb_offer fcb_offer_of(const fcb_board *board);
/* Finds the boards of all ranks, by offers in their order; this one's own is at `rank`. 0: some
 * could not be found, or have another room; the board can only be closed then. */
int fcb_join(fcb_board *board, int rank, int world, const fcb_offer *offers);
/* Says to the others that no more will come. */
void fcb_give_up(fcb_board *board);
/* That, and lets all memory go. A child of fork() that closes what its parent opened says nothing.
 * NULL is fine. */
void fcb_close(fcb_board *board);

/* Memory for this rank's next message; NULL while others have too much to read yet. `bytes` is at
 * most the room. A second call before fcb_post gives it anew. */
char *fcb_room(fcb_board *board, size_t bytes);
/* The memory that fcb_room gave is a message now, of a kind that its readers know. */
void fcb_post(fcb_board *board, uint32_t kind);

typedef enum fcb_state {
    FCB_YET = 0, /* not yet */
    FCB_HERE,    /* posted */
    FCB_GONE,    /* nothing will come: the rank has closed its board, or its process has ended */
    FCB_BAD,     /* it says what cannot be */
} fcb_state;

/* The next message of `rank`, which this one has not read. */
fcb_state fcb_look(fcb_board *board, int rank, fcb_message *message);
/* The next message of all other ranks was read, and its memory is theirs again. */
void fcb_read(fcb_board *board);

/* Of some rank that keeps others from posting more: it has not read for longest. -1: there is room
 * for something. */
int fcb_slowest(const fcb_board *board);
/* Whether a rank has closed its board or its process has ended. A system call; fcb_look only knows
 * of the first. */
int fcb_ended(const fcb_board *board, int rank);

/* A number that is another one when some rank has posted or read something. */
uint32_t fcb_news(const fcb_board *board);
/* Waits until there are news since `known`, or some board is closed, for `ms` milliseconds at most;
 * it may come back early. */
void fcb_sleep(fcb_board *board, uint32_t known, int64_t ms);

#ifdef __cplusplus
}
#endif

#endif
