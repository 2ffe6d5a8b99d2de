/* Boards: what is not found, what cannot be had, and what is not believed. */
#include "shm_ring_ranks.h"

#include <sys/resource.h>

/* ---- what is refused ---- */

/* What the test's pid does in a child of its own, with limits of its own. */
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

/* Whether a ring with that much capacity finds the offered one; either way nothing stays open. */
static int finds(size_t capacity, int rank, int world_size, const shm_ring_handle *handle) {
    const int before = open_files();
    shm_ring_handle handles[SHM_RING_MAX_RANKS + 1];
    for (int i = 0; i <= SHM_RING_MAX_RANKS; i++) {
        handles[i] = *handle;
    }
    shm_ring *ring = shm_ring_create(capacity);
    require(ring != NULL && open_files() == before + 1);
    const int found = shm_ring_connect(ring, rank, world_size, handles);
    require(!found || !shm_ring_connect(ring, rank, world_size, handles)); /* once only */
    shm_ring_destroy(ring);
    require(open_files() == before);
    return found;
}

static shm_ring *offered, *closed_one;
static shm_ring_handle the_offer, closed_offer;

/* What a child does that knows a ring of its parent. */
static void beside_an_offer(void (*does)(void)) {
    offered = shm_ring_create(CAPACITY);
    assert_non_null(offered);
    the_offer = shm_ring_get_handle(offered);
    in_a_child(does);
    shm_ring_destroy(offered);
}

static shm_ring_handle offer_of_file(int file) {
    return (shm_ring_handle){(int64_t)getppid(), file, the_offer.token};
}

static void look_for_others(void) {
    const shm_ring_handle right = the_offer;
    require(finds(CAPACITY, 0, 2, &right) && finds(CAPACITY, 1, 2, &right) &&
            finds(CAPACITY + 1, 0, 2, &right));
    require(finds(CAPACITY, SHM_RING_MAX_RANKS - 1, SHM_RING_MAX_RANKS,
                  &right)); /* a ring may be found twice */
    require(!finds(CAPACITY + CACHE_LINE, 0, 2, &right) &&
            !finds(CAPACITY - CACHE_LINE, 0, 2, &right));
    require(!finds(CAPACITY, 0, SHM_RING_MAX_RANKS + 1, &right) && !finds(CAPACITY, 0, 1, &right));
    require(!finds(CAPACITY, 2, 2, &right) && !finds(CAPACITY, -1, 2, &right));
    const shm_ring_handle wrong[] = {
        {right.pid, right.fd, right.token + 1},
        {right.pid, right.fd + 1, right.token},
        {right.pid, -1, right.token},
        {right.pid, INT64_MAX, right.token},
        {0, right.fd, right.token},
        {-1, right.fd, right.token},
        {getpid(), right.fd, right.token},
        {INT64_MAX, right.fd, right.token},
        {1, right.fd, right.token},
        closed_offer,
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        require(!finds(CAPACITY, 0, 2, &wrong[i]));
    }
    offered->own.page->capacity = CAPACITY - CACHE_LINE; /* it says something else than its size */
    require(!finds(CAPACITY, 0, 2, &right));
}

static void only_the_board_of_an_offer_is_found(void **state) {
    (void)state;
    offered = shm_ring_create(CAPACITY);
    closed_one = shm_ring_create(CAPACITY);
    assert_true(offered != NULL && closed_one != NULL);
    the_offer = shm_ring_get_handle(offered);
    closed_offer = shm_ring_get_handle(closed_one);
    shm_ring_destroy(closed_one);
    in_a_child(look_for_others);
    shm_ring_destroy(offered);
}

static int files[3];

static void look_for_files(void) {
    for (size_t i = 0; i < 3; i++) {
        const shm_ring_handle handle = offer_of_file(files[i]);
        require(!finds(CAPACITY, 0, 2, &handle));
    }
}

/* A pipe; memory of a wrong size; and memory of the right one that could become less. */
static void other_files_are_no_boards(void **state) {
    (void)state;
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    files[0] = ends[0];
    offered = shm_ring_create(CAPACITY);
    assert_non_null(offered);
    the_offer = shm_ring_get_handle(offered);
    for (int i = 1; i < 3; i++) {
        files[i] = memfd_create("other", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        assert_true(files[i] >= 0);
        assert_int_equal(write(files[i], offered->own.page, sizeof(shared_page)),
                         sizeof(shared_page));
        assert_int_equal(ftruncate(files[i], (off_t)segment_bytes(CAPACITY) - (i == 1)), 0);
    }
    assert_int_equal(fcntl(files[1], F_ADD_SEALS, F_SEAL_SHRINK), 0);
    in_a_child(look_for_files);
    shm_ring_destroy(offered);
    for (int i = 0; i < 3; i++) {
        (void)close(files[i]);
    }
    (void)close(ends[1]);
}

static void limit_files(rlim_t to) {
    struct rlimit now;
    require(getrlimit(RLIMIT_NOFILE, &now) == 0);
    now.rlim_cur = to;
    require(setrlimit(RLIMIT_NOFILE, &now) == 0);
}

static void limit_bytes(rlim_t to) {
    struct rlimit now;
    require(getrlimit(RLIMIT_FSIZE, &now) == 0);
    now.rlim_cur = to;
    require(setrlimit(RLIMIT_FSIZE, &now) == 0);
}

/* The number that the next file gets is the first that is forbidden. */
static void open_under_limits(void) {
    const int before = open_files();
    struct rlimit files_before;
    require(getrlimit(RLIMIT_NOFILE, &files_before) == 0);
    const int next = dup(0);
    require(next >= 0 && close(next) == 0);
    limit_files((rlim_t)next);
    require(shm_ring_create(CAPACITY) == NULL);
    limit_files((rlim_t)next + 1);
    require(!finds(CAPACITY, 0, 2, &the_offer)); /* one file only */
    limit_files(files_before.rlim_cur);
    require(finds(CAPACITY, 0, 2, &the_offer));
    require(signal(SIGXFSZ, SIG_DFL) != SIG_ERR); /* which ends a pid */
    limit_bytes(CAPACITY);
    require(shm_ring_create(CAPACITY) == NULL);
    limit_bytes(segment_bytes(CAPACITY));
    require(finds(CAPACITY, 0, 2, &the_offer));
    require(open_files() == before);
}

static void limits_of_the_system_are_no_crash(void **state) {
    (void)state;
    beside_an_offer(open_under_limits);
    const size_t never[] = {0, CACHE_LINE - 1, SIZE_MAX, SIZE_MAX / 2,
                            SIZE_MAX - sizeof(shared_page)};
    for (size_t i = 0; i < sizeof never / sizeof never[0]; i++) {
        assert_null(shm_ring_create(never[i]));
    }
    shm_ring_destroy(NULL);
}

/* What the program prints is no message. */
static void open_without_streams(void) {
    for (int stream = 0; stream <= STDERR_FILENO; stream++) {
        (void)close(stream);
    }
    const int before = open_files();
    shm_ring *ring = shm_ring_create(CAPACITY);
    const shm_ring_handle handles[] = {the_offer, the_offer};
    require(ring != NULL && shm_ring_connect(ring, 0, 2, handles));
    for (int stream = 0; stream <= STDERR_FILENO; stream++) {
        require(fcntl(stream, F_GETFD) < 0);
    }
    require(fcntl(ring->own.fd, F_GETFD) == FD_CLOEXEC);
    require(fcntl(ring->views[1].fd, F_GETFD) == FD_CLOEXEC);
    require(!shm_ring_peer_has_ended(ring, 1));
    shm_ring_destroy(ring);
    require(open_files() == before);
}

static void boards_are_no_standard_streams(void **state) {
    (void)state;
    beside_an_offer(open_without_streams);
}

/* ---- nonsense ---- */

static void a_letter_that_cannot_be_is_not_believed(void **state) {
    (void)state;
    const message_header wrong[] = {
        {0, CAPACITY + CACHE_LINE, 0},
        {0, UINT64_MAX / CACHE_LINE * CACHE_LINE, 1},
        {0, 0, CAPACITY + 1},
        {0, 0, UINT64_MAX},
        {0, CACHE_LINE, CAPACITY - CACHE_LINE + 1},
        {0, CACHE_LINE, UINT64_MAX - CACHE_LINE + 1},
        {0, 1, 1},
        {0, CAPACITY, 1},
    };
    shm_ring_message got;
    peer_commits();
    assert_int_equal(shm_ring_peek(rings[0], 1, &got), SHM_RING_READY);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        rings[1]->own.page->headers[0] = wrong[i];
        assert_int_equal(shm_ring_peek(rings[0], 1, &got), SHM_RING_CORRUPT);
    }
}

static void a_number_that_cannot_be_is_not_believed(void **state) {
    (void)state;
    shm_ring_message got;
    const uint32_t wrong[] = {HEADER_SLOTS + 1, 1u << 31, UINT32_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        rings[1]->own.page->committed = wrong[i];
        assert_int_equal(shm_ring_peek(rings[0], 1, &got), SHM_RING_CORRUPT);
    }
    rings[1]->own.page->committed = HEADER_SLOTS;
    assert_int_equal(shm_ring_peek(rings[0], 1, &got), SHM_RING_READY);
}

/* Nothing of what this rank does leads out of the rooms. */
static void work_beside(shared_page *theirs) {
    shm_ring_message got;
    const size_t bytes = random_below(CAPACITY + 1);
    const char *buffer = shm_ring_reserve(rings[0], bytes);
    if (buffer != NULL) {
        const size_t at = (size_t)(buffer - data_of(&rings[0]->own));
        assert_true(at <= CAPACITY && bytes <= CAPACITY - at);
        shm_ring_commit(rings[0], 0);
    }
    if (shm_ring_peek(rings[0], 1, &got) == SHM_RING_READY) {
        const size_t at = (size_t)(got.data - (const char *)(theirs + 1));
        assert_true(at <= CAPACITY && got.bytes <= CAPACITY - at);
        shm_ring_release(rings[0]);
    }
    const int slowest = shm_ring_slowest_reader(rings[0]);
    assert_true(slowest == 1 || slowest == -1);
    shm_ring_wait(rings[0], shm_ring_seq(rings[0]) + random_below(2), 0);
}

static void nonsense_at_random_does_not_lead_out(void **state) {
    (void)state;
    shared_page *theirs = rings[0]->views[1].page;
    me.random = 77;
    for (int i = 0; i < 2000; i++) {
        theirs->committed = rings[0]->read_seq + (random_below(2) ? random_below(HEADER_SLOTS + 2)
                                                                  : random_below(UINT32_MAX));
        theirs->released = rings[0]->own.page->committed -
                           (random_below(2) ? random_below(4) : random_below(UINT32_MAX));
        theirs->sleepers = random_below(3);
        for (size_t k = 0; k < HEADER_SLOTS; k++) {
            const uint64_t at = random_below(2)
                                    ? random_below(2 * CAPACITY / CACHE_LINE) * CACHE_LINE
                                    : mix(random_below(UINT32_MAX));
            const uint64_t bytes =
                random_below(2) ? random_below(CAPACITY) : mix(random_below(UINT32_MAX));
            theirs->headers[k] = (message_header){random_below(9), at, bytes};
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
        cmocka_unit_test_setup_teardown(a_letter_that_cannot_be_is_not_believed, create_two_rings,
                                        destroy_two_rings),
        cmocka_unit_test_setup_teardown(a_number_that_cannot_be_is_not_believed, create_two_rings,
                                        destroy_two_rings),
        cmocka_unit_test_setup_teardown(nonsense_at_random_does_not_lead_out, create_two_rings,
                                        destroy_two_rings),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
