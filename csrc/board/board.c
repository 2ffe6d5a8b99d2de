/* Shared memory of ranks on one host; see board.h.
 *
 * A board is a file of memory: a page of words and letters, and the room for messages. Who sleeps
 * counts itself first and looks for news once more; who makes news looks for sleepers afterwards,
 * and rings: both in one order for all, so that one of the two sees the other. A rank sleeps on a
 * bell of its own, for what it waits for may come from anybody.
 *
 * Messages lie in the room one after the other, as in a ring, but none is cut in two. When all are
 * read the next begins in front again, where memory is warm. */
#define _GNU_SOURCE 1 /* memfd_create, syscall */
#include "board.h"

#include <stdlib.h>

#ifdef __linux__

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    LINE = 64,
    LETTERS = 64, /* a power of two: numbers wrap */
    SPINS = 64,   /* looks before a sleep, the processor given away between them */
    DAY = 24 * 3600 * 1000,
};

typedef struct fcb_letter {
    uint32_t kind;
    uint64_t at; /* in the room */
    uint64_t bytes;
} fcb_letter;

/* In the memory that all ranks see. Its owner writes all but the bell. */
typedef struct fcb_page {
    uint64_t token;
    uint64_t room;
    _Alignas(LINE) _Atomic uint32_t posted; /* messages so far */
    _Atomic uint32_t read;                  /* of each other rank */
    _Atomic uint32_t closed;
    _Alignas(LINE) _Atomic uint32_t asleep; /* threads */
    _Atomic uint32_t bell;                  /* that they sleep on; others ring it */
    _Alignas(LINE) fcb_letter letters[LETTERS];
} fcb_page;

/* One rank's board, as this process sees it. */
typedef struct fcb_view {
    fcb_page *page; /* NULL: not found */
    int file;
} fcb_view;

struct fcb_board {
    size_t room;
    int64_t process; /* that opened it */
    int rank;
    int world;
    fcb_view own; /* until it has joined; then views[rank] is the same */
    fcb_view views[FCB_RANKS];
    uint32_t number;           /* messages of each other rank that were read */
    uint64_t begins[LETTERS];  /* where messages of this rank lie in the room */
    uint64_t end;              /* of the last one */
    uint64_t next, next_bytes; /* what fcb_room gave */
};

/* ---- files of memory ---- */

static size_t bytes_of(size_t room) {
    return sizeof(fcb_page) + room;
}

static char *room_of(const fcb_view *view) {
    return (char *)(view->page + 1);
}

static fcb_page *map_file(int file, size_t room) {
    void *at = mmap(NULL, bytes_of(room), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    return at == MAP_FAILED ? NULL : (fcb_page *)at;
}

static void let_go(fcb_view *view, size_t room) {
    if (view->page != NULL) {
        (void)munmap(view->page, bytes_of(room));
        (void)close(view->file);
        view->page = NULL;
    }
}

/* The same file under a number that no standard stream has, or -1: a program may have closed those,
 * and what it prints would go onto the board. */
static int beside_streams(int file) {
    if (file < 0 || file > STDERR_FILENO) {
        return file;
    }
    const int beside = fcntl(file, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    (void)close(file);
    return beside;
}

/* The lock of an owner that lives. It belongs to the process, and no child of fork() has it. */
static struct flock life(void) {
    return (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};
}

static uint64_t random_token(void) {
    uint64_t token = 0;
    if (getrandom(&token, sizeof token, GRND_NONBLOCK) != (ssize_t)sizeof token) {
        struct timespec now;
        (void)clock_gettime(CLOCK_MONOTONIC, &now);
        token = (uint64_t)now.tv_nsec << 32 ^ (uint64_t)now.tv_sec ^ (uint64_t)getpid() << 16;
    }
    return token >> 1; /* of a number with a sign */
}

/* Whether this process may make a file so large. Who tries all the same is sent a signal, which may
 * end it. */
static int may_have(size_t bytes) {
    struct rlimit most;
    return getrlimit(RLIMIT_FSIZE, &most) != 0 || bytes <= most.rlim_cur;
}

static int make_own(fcb_board *board) {
    if (!may_have(bytes_of(board->room))) {
        return 0;
    }
    const int file = beside_streams(memfd_create("fsdp_c board", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (file < 0) {
        return 0;
    }
    struct flock lock = life();
    fcb_page *made = NULL;
    if (ftruncate(file, (off_t)bytes_of(board->room)) == 0 &&
        fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0 &&
        fcntl(file, F_SETLK, &lock) == 0) {
        made = map_file(file, board->room);
    }
    if (made == NULL) {
        (void)close(file);
        return 0;
    }
    made->token = random_token();
    made->room = board->room;
    board->own = (fcb_view){made, file};
    return 1;
}

fcb_board *fcb_open(size_t room) {
    if (room > PTRDIFF_MAX - sizeof(fcb_page)) {
        return NULL;
    }
    fcb_board *board = (fcb_board *)calloc(1, sizeof *board);
    if (board == NULL) {
        return NULL;
    }
    board->room = room / LINE * LINE;
    board->process = (int64_t)getpid();
    if (board->room == 0 || !make_own(board)) {
        free(board);
        return NULL;
    }
    return board;
}

fcb_offer fcb_offer_of(const fcb_board *board) {
    return (fcb_offer){board->process, board->own.file, (int64_t)board->own.page->token};
}

static int has_size(const struct stat *facts, size_t room) {
    return S_ISREG(facts->st_mode) && facts->st_size == (off_t)bytes_of(room);
}

/* Maps what another process has open; only a file of the right size, which stays, that knows the
 * token. Where processes have other numbers there, it may be anything: a device that is opened may
 * do something, and a file that is closed loses this process's locks. So it is looked at first. */
static int find(fcb_view *found, const fcb_offer *offer, size_t room) {
    char path[64];
    (void)snprintf(path, sizeof path, "/proc/%lld/fd/%lld", (long long)offer->process,
                   (long long)offer->file);
    struct stat facts;
    if (stat(path, &facts) != 0 || !has_size(&facts, room)) {
        return 0;
    }
    const int file = beside_streams(open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK));
    if (file < 0) {
        return 0;
    }
    const int seals = fcntl(file, F_GET_SEALS);
    fcb_page *at = NULL;
    if (seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && fstat(file, &facts) == 0 &&
        has_size(&facts, room)) {
        at = map_file(file, room);
    }
    if (at == NULL) {
        (void)close(file);
        return 0;
    }
    *found = (fcb_view){at, file};
    return at->token == (uint64_t)offer->token && at->room == room;
}

int fcb_join(fcb_board *board, int rank, int world, const fcb_offer *offers) {
    if (world < 2 || world > FCB_RANKS || rank < 0 || rank >= world || board->world != 0) {
        return 0;
    }
    board->rank = rank;
    board->world = world;
    board->views[rank] = board->own;
    for (int other = 0; other < world; other++) {
        if (other == rank) {
            continue;
        }
        /* Ranks of one process would share its lock. */
        if (offers[other].process <= 0 || offers[other].process == board->process ||
            !find(&board->views[other], &offers[other], board->room)) {
            return 0;
        }
    }
    return 1;
}

/* ---- news ---- */

static void wake_others(const fcb_board *board) {
    for (int other = 0; other < board->world; other++) {
        fcb_page *theirs = board->views[other].page;
        if (other != board->rank && theirs != NULL && atomic_load(&theirs->asleep) != 0) {
            (void)atomic_fetch_add(&theirs->bell, 1);
            (void)syscall(SYS_futex, &theirs->bell, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
        }
    }
}

void fcb_give_up(fcb_board *board) {
    if (board->process == (int64_t)getpid()) {
        atomic_store(&board->own.page->closed, 1);
        wake_others(board);
    }
}

void fcb_close(fcb_board *board) {
    if (board == NULL) {
        return;
    }
    fcb_give_up(board);
    for (int other = 0; other < board->world; other++) {
        if (other != board->rank) {
            let_go(&board->views[other], board->room);
        }
    }
    let_go(&board->own, board->room);
    free(board);
}

int fcb_ended(const fcb_board *board, int rank) {
    const fcb_view *theirs = &board->views[rank];
    struct flock lock = life();
    return atomic_load(&theirs->page->closed) != 0 ||
           (fcntl(theirs->file, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK);
}

/* Words that only grow, added up, so that the sum is another one while not all have wrapped. */
uint32_t fcb_news(const fcb_board *board) {
    uint32_t news = 0;
    for (int other = 0; other < board->world; other++) {
        fcb_page *theirs = board->views[other].page;
        if (other != board->rank && theirs != NULL) {
            news += atomic_load(&theirs->posted) + atomic_load(&theirs->read) +
                    atomic_load(&theirs->closed);
        }
    }
    return news;
}

static int64_t now_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int news_soon(const fcb_board *board, uint32_t known) {
    for (int i = 0; i < SPINS; i++) {
        if (fcb_news(board) != known) {
            return 1;
        }
        (void)sched_yield();
    }
    return 0;
}

static void sleep_on_bell(fcb_board *board, uint32_t known, int64_t until) {
    fcb_page *own = board->own.page;
    (void)atomic_fetch_add(&own->asleep, 1);
    for (;;) {
        const uint32_t rung = atomic_load(&own->bell);
        const int64_t left = until - now_ns();
        if (left <= 0 || fcb_news(board) != known) {
            break;
        }
        const struct timespec time = {.tv_sec = (time_t)(left / 1000000000),
                                      .tv_nsec = (long)(left % 1000000000)};
        (void)syscall(SYS_futex, &own->bell, FUTEX_WAIT, rung, &time, NULL, 0);
    }
    (void)atomic_fetch_sub(&own->asleep, 1);
}

void fcb_sleep(fcb_board *board, uint32_t known, int64_t ms) {
    const int64_t most = ms < 0 ? 0 : ms < DAY ? ms : DAY;
    if (!news_soon(board, known)) {
        sleep_on_bell(board, known, now_ns() + most * 1000000);
    }
}

/* ---- posting ---- */

/* How many messages of this rank some other one has yet to read, and, if asked, who. */
static uint32_t unread(const fcb_board *board, int *slowest) {
    const uint32_t posted = atomic_load_explicit(&board->own.page->posted, memory_order_relaxed);
    uint32_t most = 0;
    for (int other = 0; other < board->world; other++) {
        if (other == board->rank) {
            continue;
        }
        const fcb_page *theirs = board->views[other].page;
        uint32_t left = posted - atomic_load_explicit(&theirs->read, memory_order_acquire);
        left = left > LETTERS ? LETTERS : left; /* nothing is that late */
        if (left > most) {
            most = left;
            if (slowest != NULL) {
                *slowest = other;
            }
        }
    }
    return most;
}

/* Where so many bytes may go; the room's size where they may not. */
static uint64_t place(const fcb_board *board, uint64_t bytes) {
    const uint64_t room = board->room, none = room;
    const uint32_t waiting = unread(board, NULL);
    if (waiting == 0) {
        return bytes <= room ? 0 : none;
    }
    if (waiting >= LETTERS) {
        return none;
    }
    const uint32_t posted = atomic_load_explicit(&board->own.page->posted, memory_order_relaxed);
    const uint64_t begin = board->begins[(posted - waiting) % LETTERS];
    if (begin < board->end) {
        if (bytes <= room - board->end) {
            return board->end;
        }
        return bytes <= begin ? 0 : none;
    }
    return bytes <= begin - board->end ? board->end : none;
}

/* What a message takes of the room: whole lines, and an empty one a line as well. */
static uint64_t whole_lines(uint64_t bytes) {
    return bytes == 0 ? LINE : (bytes + LINE - 1) / LINE * LINE;
}

char *fcb_room(fcb_board *board, size_t bytes) {
    const uint64_t at = place(board, whole_lines(bytes));
    if (at == board->room) {
        return NULL;
    }
    board->next = at;
    board->next_bytes = bytes;
    return room_of(&board->own) + at;
}

void fcb_post(fcb_board *board, uint32_t kind) {
    fcb_page *own = board->own.page;
    const uint32_t number = atomic_load_explicit(&own->posted, memory_order_relaxed);
    own->letters[number % LETTERS] = (fcb_letter){kind, board->next, board->next_bytes};
    board->begins[number % LETTERS] = board->next;
    board->end = board->next + whole_lines(board->next_bytes);
    atomic_store(&own->posted, number + 1);
    wake_others(board);
}

int fcb_slowest(const fcb_board *board) {
    int slowest = -1;
    (void)unread(board, &slowest);
    return slowest;
}

/* ---- reading ---- */

fcb_state fcb_look(fcb_board *board, int rank, fcb_message *message) {
    const fcb_view *theirs = &board->views[rank];
    const uint32_t closed = atomic_load_explicit(&theirs->page->closed, memory_order_acquire);
    const uint32_t posted = atomic_load_explicit(&theirs->page->posted, memory_order_acquire);
    if (posted == board->number) {
        return closed != 0 ? FCB_GONE : FCB_YET;
    }
    /* Read once: what was checked is what is used. */
    const volatile fcb_letter *letter = &theirs->page->letters[board->number % LETTERS];
    const fcb_letter got = {letter->kind, letter->at, letter->bytes};
    if (posted - board->number > LETTERS || got.at > board->room || got.at % LINE != 0 ||
        got.bytes > board->room - got.at) {
        return FCB_BAD;
    }
    *message = (fcb_message){got.kind, (size_t)got.bytes, room_of(theirs) + got.at};
    return FCB_HERE;
}

void fcb_read(fcb_board *board) {
    fcb_page *own = board->own.page;
    board->number++;
    atomic_store(&own->read, board->number);
    wake_others(board);
}

#else /* no such memory */

fcb_board *fcb_open(size_t room) {
    (void)room;
    return NULL;
}
fcb_offer fcb_offer_of(const fcb_board *board) {
    (void)board;
    return (fcb_offer){0, 0, 0};
}
int fcb_join(fcb_board *board, int rank, int world, const fcb_offer *offers) {
    (void)board, (void)rank, (void)world, (void)offers;
    return 0;
}
void fcb_give_up(fcb_board *board) {
    (void)board;
}
void fcb_close(fcb_board *board) {
    (void)board;
}
char *fcb_room(fcb_board *board, size_t bytes) {
    (void)board, (void)bytes;
    return NULL;
}
void fcb_post(fcb_board *board, uint32_t kind) {
    (void)board, (void)kind;
}
fcb_state fcb_look(fcb_board *board, int rank, fcb_message *message) {
    (void)board, (void)rank, (void)message;
    return FCB_GONE;
}
void fcb_read(fcb_board *board) {
    (void)board;
}
int fcb_slowest(const fcb_board *board) {
    (void)board;
    return -1;
}
int fcb_ended(const fcb_board *board, int rank) {
    (void)board, (void)rank;
    return 1;
}
uint32_t fcb_news(const fcb_board *board) {
    (void)board;
    return 0;
}
void fcb_sleep(fcb_board *board, uint32_t known, int64_t ms) {
    (void)board, (void)known, (void)ms;
}

#endif
