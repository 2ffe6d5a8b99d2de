/* Boards: what is not found, what cannot be had, and what is not believed. */
#include "board_ranks.h"

#include <sys/resource.h>

/* ---- what is refused ---- */

/* What the test's process does in a child of its own, with limits of its own. */
static void in_a_child(void (*does)(void)) {
    const pid_t child = fork();
    int status = -1;
    if (child == 0) {
        (void)alarm(ALARM);
        does();
        _exit(0);
    }
    assert_true(child > 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
}

static int open_files(void) {
    int files = 0;
    for (int file = 0; file < 200; file++) {
        files += fcntl(file, F_GETFD) >= 0;
    }
    return files;
}

/* Whether a board with that much room finds the offered one; either way nothing stays open. */
static int finds(size_t room, int rank, int world, const fcb_offer *offer) {
    const int before = open_files();
    fcb_offer offers[FCB_RANKS + 1];
    for (int i = 0; i <= FCB_RANKS; i++) {
        offers[i] = *offer;
    }
    fcb_board *board = fcb_open(room);
    must(board != NULL && open_files() == before + 1);
    const int found = fcb_join(board, rank, world, offers);
    must(!found || !fcb_join(board, rank, world, offers)); /* once only */
    fcb_close(board);
    must(open_files() == before);
    return found;
}

static fcb_board *offered, *closed_one;
static fcb_offer the_offer, closed_offer;

/* What a child does that knows a board of its parent. */
static void beside_an_offer(void (*does)(void)) {
    offered = fcb_open(ROOM);
    assert_non_null(offered);
    the_offer = fcb_offer_of(offered);
    in_a_child(does);
    fcb_close(offered);
}

static fcb_offer offer_of_file(int file) {
    return (fcb_offer){(int64_t)getppid(), file, the_offer.token};
}

static void look_for_others(void) {
    const fcb_offer right = the_offer;
    must(finds(ROOM, 0, 2, &right) && finds(ROOM, 1, 2, &right) && finds(ROOM + 1, 0, 2, &right));
    must(finds(ROOM, FCB_RANKS - 1, FCB_RANKS, &right)); /* a board may be found twice */
    must(!finds(ROOM + LINE, 0, 2, &right) && !finds(ROOM - LINE, 0, 2, &right));
    must(!finds(ROOM, 0, FCB_RANKS + 1, &right) && !finds(ROOM, 0, 1, &right));
    must(!finds(ROOM, 2, 2, &right) && !finds(ROOM, -1, 2, &right));
    const fcb_offer wrong[] = {
        {right.process, right.file, right.token + 1},
        {right.process, right.file + 1, right.token},
        {right.process, -1, right.token},
        {right.process, INT64_MAX, right.token},
        {0, right.file, right.token},
        {-1, right.file, right.token},
        {getpid(), right.file, right.token},
        {INT64_MAX, right.file, right.token},
        {1, right.file, right.token},
        closed_offer,
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        must(!finds(ROOM, 0, 2, &wrong[i]));
    }
    offered->own.page->room = ROOM - LINE; /* it says something else than its size */
    must(!finds(ROOM, 0, 2, &right));
}

static void only_the_board_of_an_offer_is_found(void **state) {
    (void)state;
    offered = fcb_open(ROOM);
    closed_one = fcb_open(ROOM);
    assert_true(offered != NULL && closed_one != NULL);
    the_offer = fcb_offer_of(offered);
    closed_offer = fcb_offer_of(closed_one);
    fcb_close(closed_one);
    in_a_child(look_for_others);
    fcb_close(offered);
}

static int files[3];

static void look_for_files(void) {
    for (size_t i = 0; i < 3; i++) {
        const fcb_offer offer = offer_of_file(files[i]);
        must(!finds(ROOM, 0, 2, &offer));
    }
}

/* A pipe; memory of a wrong size; and memory of the right one that could become less. */
static void other_files_are_no_boards(void **state) {
    (void)state;
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    files[0] = ends[0];
    offered = fcb_open(ROOM);
    assert_non_null(offered);
    the_offer = fcb_offer_of(offered);
    for (int i = 1; i < 3; i++) {
        files[i] = memfd_create("other", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        assert_true(files[i] >= 0);
        assert_int_equal(write(files[i], offered->own.page, sizeof(fcb_page)), sizeof(fcb_page));
        assert_int_equal(ftruncate(files[i], (off_t)bytes_of(ROOM) - (i == 1)), 0);
    }
    assert_int_equal(fcntl(files[1], F_ADD_SEALS, F_SEAL_SHRINK), 0);
    in_a_child(look_for_files);
    fcb_close(offered);
    for (int i = 0; i < 3; i++) {
        (void)close(files[i]);
    }
    (void)close(ends[1]);
}

static void limit_files(rlim_t to) {
    struct rlimit now;
    must(getrlimit(RLIMIT_NOFILE, &now) == 0);
    now.rlim_cur = to;
    must(setrlimit(RLIMIT_NOFILE, &now) == 0);
}

static void limit_bytes(rlim_t to) {
    struct rlimit now;
    must(getrlimit(RLIMIT_FSIZE, &now) == 0);
    now.rlim_cur = to;
    must(setrlimit(RLIMIT_FSIZE, &now) == 0);
}

/* The number that the next file gets is the first that is forbidden. */
static void open_under_limits(void) {
    const int before = open_files();
    struct rlimit files_before;
    must(getrlimit(RLIMIT_NOFILE, &files_before) == 0);
    const int next = dup(0);
    must(next >= 0 && close(next) == 0);
    limit_files((rlim_t)next);
    must(fcb_open(ROOM) == NULL);
    limit_files((rlim_t)next + 1);
    must(!finds(ROOM, 0, 2, &the_offer)); /* one file only */
    limit_files(files_before.rlim_cur);
    must(finds(ROOM, 0, 2, &the_offer));
    must(signal(SIGXFSZ, SIG_DFL) != SIG_ERR); /* which ends a process */
    limit_bytes(ROOM);
    must(fcb_open(ROOM) == NULL);
    limit_bytes(bytes_of(ROOM));
    must(finds(ROOM, 0, 2, &the_offer));
    must(open_files() == before);
}

static void limits_of_the_system_are_no_crash(void **state) {
    (void)state;
    beside_an_offer(open_under_limits);
    const size_t never[] = {0, LINE - 1, SIZE_MAX, SIZE_MAX / 2, SIZE_MAX - sizeof(fcb_page)};
    for (size_t i = 0; i < sizeof never / sizeof never[0]; i++) {
        assert_null(fcb_open(never[i]));
    }
    fcb_close(NULL);
}

/* What the program prints is no message. */
static void open_without_streams(void) {
    for (int stream = 0; stream <= STDERR_FILENO; stream++) {
        (void)close(stream);
    }
    const int before = open_files();
    fcb_board *board = fcb_open(ROOM);
    const fcb_offer offers[] = {the_offer, the_offer};
    must(board != NULL && fcb_join(board, 0, 2, offers));
    for (int stream = 0; stream <= STDERR_FILENO; stream++) {
        must(fcntl(stream, F_GETFD) < 0);
    }
    must(fcntl(board->own.file, F_GETFD) == FD_CLOEXEC);
    must(fcntl(board->views[1].file, F_GETFD) == FD_CLOEXEC);
    must(!fcb_ended(board, 1));
    fcb_close(board);
    must(open_files() == before);
}

static void boards_are_no_standard_streams(void **state) {
    (void)state;
    beside_an_offer(open_without_streams);
}

/* ---- nonsense ---- */

static void a_letter_that_cannot_be_is_not_believed(void **state) {
    (void)state;
    const fcb_letter wrong[] = {
        {0, ROOM + LINE, 0},
        {0, UINT64_MAX / LINE * LINE, 1},
        {0, 0, ROOM + 1},
        {0, 0, UINT64_MAX},
        {0, LINE, ROOM - LINE + 1},
        {0, LINE, UINT64_MAX - LINE + 1},
        {0, 1, 1},
        {0, ROOM, 1},
    };
    fcb_message got;
    posts();
    assert_int_equal(fcb_look(boards[0], 1, &got), FCB_HERE);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        boards[1]->own.page->letters[0] = wrong[i];
        assert_int_equal(fcb_look(boards[0], 1, &got), FCB_BAD);
    }
}

static void a_number_that_cannot_be_is_not_believed(void **state) {
    (void)state;
    fcb_message got;
    const uint32_t wrong[] = {LETTERS + 1, 1u << 31, UINT32_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        boards[1]->own.page->posted = wrong[i];
        assert_int_equal(fcb_look(boards[0], 1, &got), FCB_BAD);
    }
    boards[1]->own.page->posted = LETTERS;
    assert_int_equal(fcb_look(boards[0], 1, &got), FCB_HERE);
}

/* Nothing of what this rank does leads out of the rooms. */
static void work_beside(fcb_page *theirs) {
    fcb_message got;
    const size_t bytes = any(ROOM + 1);
    const char *room = fcb_room(boards[0], bytes);
    if (room != NULL) {
        const size_t at = (size_t)(room - room_of(&boards[0]->own));
        assert_true(at <= ROOM && bytes <= ROOM - at);
        fcb_post(boards[0], 0);
    }
    if (fcb_look(boards[0], 1, &got) == FCB_HERE) {
        const size_t at = (size_t)(got.data - (const char *)(theirs + 1));
        assert_true(at <= ROOM && got.bytes <= ROOM - at);
        fcb_read(boards[0]);
    }
    const int slowest = fcb_slowest(boards[0]);
    assert_true(slowest == 1 || slowest == -1);
    fcb_sleep(boards[0], fcb_news(boards[0]) + any(2), 0);
}

static void nonsense_at_random_does_not_lead_out(void **state) {
    (void)state;
    fcb_page *theirs = boards[0]->views[1].page;
    me.random = 77;
    for (int i = 0; i < 2000; i++) {
        theirs->posted = boards[0]->number + (any(2) ? any(LETTERS + 2) : any(UINT32_MAX));
        theirs->read = boards[0]->own.page->posted - (any(2) ? any(4) : any(UINT32_MAX));
        theirs->asleep = any(3);
        for (size_t k = 0; k < LETTERS; k++) {
            const uint64_t at = any(2) ? any(2 * ROOM / LINE) * LINE : mix(any(UINT32_MAX));
            const uint64_t bytes = any(2) ? any(ROOM) : mix(any(UINT32_MAX));
            theirs->letters[k] = (fcb_letter){any(9), at, bytes};
        }
        work_beside(theirs);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(only_the_board_of_an_offer_is_found),
        cmocka_unit_test(other_files_are_no_boards),
        cmocka_unit_test(limits_of_the_system_are_no_crash),
        cmocka_unit_test(boards_are_no_standard_streams),
        cmocka_unit_test_setup_teardown(a_letter_that_cannot_be_is_not_believed, open_two,
                                        close_two),
        cmocka_unit_test_setup_teardown(a_number_that_cannot_be_is_not_believed, open_two,
                                        close_two),
        cmocka_unit_test_setup_teardown(nonsense_at_random_does_not_lead_out, open_two, close_two),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
