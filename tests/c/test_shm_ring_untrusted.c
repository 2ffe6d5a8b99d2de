/* Shared-memory ring: invalid handles, limits of the system, and corrupt memory of peers. */
#include "shm_ring_ranks.h"

#include <sys/resource.h>

/* ---- handles and limits ---- */

/* Runs a function in a child process, which may change its limits. */
static void run_in_child(void (*run)(void)) {
    const pid_t child = fork();
    int status = -1;
    if (child == 0) {
        (void)alarm(ALARM);
        run();
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

/* Whether a new ring of `capacity` bytes connects to the handle. Requires that no descriptor leaks.
 */
static int can_connect(size_t capacity, int rank, int world_size, const shm_ring_handle *handle) {
    const int before = open_files();
    shm_ring_handle handles[SHM_RING_MAX_RANKS + 1];
    for (int i = 0; i <= SHM_RING_MAX_RANKS; i++) {
        handles[i] = *handle;
    }
    shm_ring *ring = shm_ring_create(capacity);
    require(ring != NULL && open_files() == before + 1);
    const int found = shm_ring_connect(ring, rank, world_size, handles);
    require(!found ||
            !shm_ring_connect(ring, rank, world_size, handles)); /* a second connect fails */
    shm_ring_destroy(ring);
    require(open_files() == before);
    return found;
}

static shm_ring *offered, *closed_ring;
static shm_ring_handle valid_handle, closed_handle;

/* Runs a function in a child process that has the handle of a ring of its parent. */
static void run_in_child_with_handle(void (*run)(void)) {
    offered = shm_ring_create(CAPACITY);
    assert_non_null(offered);
    valid_handle = shm_ring_get_handle(offered);
    run_in_child(run);
    shm_ring_destroy(offered);
}

static shm_ring_handle handle_of_file(int file) {
    return (shm_ring_handle){(int64_t)getppid(), file, valid_handle.token};
}

static void connect_to_handles(void) {
    const shm_ring_handle right = valid_handle;
    require(can_connect(CAPACITY, 0, 2, &right) && can_connect(CAPACITY, 1, 2, &right) &&
            can_connect(CAPACITY + 1, 0, 2, &right));
    require(can_connect(CAPACITY, SHM_RING_MAX_RANKS - 1, SHM_RING_MAX_RANKS,
                        &right)); /* a handle may occur twice */
    require(!can_connect(CAPACITY + CACHE_LINE, 0, 2, &right) &&
            !can_connect(CAPACITY - CACHE_LINE, 0, 2, &right));
    require(!can_connect(CAPACITY, 0, SHM_RING_MAX_RANKS + 1, &right) &&
            !can_connect(CAPACITY, 0, 1, &right));
    require(!can_connect(CAPACITY, 2, 2, &right) && !can_connect(CAPACITY, -1, 2, &right));
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
        closed_handle,
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        require(!can_connect(CAPACITY, 0, 2, &wrong[i]));
    }
    offered->own.page->capacity = CAPACITY - CACHE_LINE; /* a wrong capacity in the shared page */
    require(!can_connect(CAPACITY, 0, 2, &right));
}

static void connect_accepts_only_the_ring_of_the_handle(void **state) {
    (void)state;
    offered = shm_ring_create(CAPACITY);
    closed_ring = shm_ring_create(CAPACITY);
    assert_true(offered != NULL && closed_ring != NULL);
    valid_handle = shm_ring_get_handle(offered);
    closed_handle = shm_ring_get_handle(closed_ring);
    shm_ring_destroy(closed_ring);
    run_in_child(connect_to_handles);
    shm_ring_destroy(offered);
}

static int files[3];

static void connect_to_files(void) {
    for (size_t i = 0; i < 3; i++) {
        const shm_ring_handle handle = handle_of_file(files[i]);
        require(!can_connect(CAPACITY, 0, 2, &handle));
    }
}

/* A pipe, a memfd of a wrong size, and a memfd without F_SEAL_SHRINK. */
static void connect_refuses_files_that_are_not_rings(void **state) {
    (void)state;
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    files[0] = ends[0];
    offered = shm_ring_create(CAPACITY);
    assert_non_null(offered);
    valid_handle = shm_ring_get_handle(offered);
    for (int i = 1; i < 3; i++) {
        files[i] = memfd_create("other", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        assert_true(files[i] >= 0);
        assert_int_equal(write(files[i], offered->own.page, sizeof(shared_page)),
                         sizeof(shared_page));
        assert_int_equal(ftruncate(files[i], (off_t)segment_bytes(CAPACITY) - (i == 1)), 0);
    }
    assert_int_equal(fcntl(files[1], F_ADD_SEALS, F_SEAL_SHRINK), 0);
    run_in_child(connect_to_files);
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

/* RLIMIT_NOFILE forbids the next descriptor, then the one after it. */
static void create_under_limits(void) {
    const int before = open_files();
    struct rlimit files_before;
    require(getrlimit(RLIMIT_NOFILE, &files_before) == 0);
    const int next = dup(0);
    require(next >= 0 && close(next) == 0);
    limit_files((rlim_t)next);
    require(shm_ring_create(CAPACITY) == NULL);
    limit_files((rlim_t)next + 1);
    require(!can_connect(CAPACITY, 0, 2, &valid_handle)); /* one descriptor only */
    limit_files(files_before.rlim_cur);
    require(can_connect(CAPACITY, 0, 2, &valid_handle));
    require(signal(SIGXFSZ, SIG_DFL) != SIG_ERR); /* the default action ends the process */
    limit_bytes(CAPACITY);
    require(shm_ring_create(CAPACITY) == NULL);
    limit_bytes(segment_bytes(CAPACITY));
    require(can_connect(CAPACITY, 0, 2, &valid_handle));
    require(open_files() == before);
}

static void create_and_connect_under_resource_limits_fail_cleanly(void **state) {
    (void)state;
    run_in_child_with_handle(create_under_limits);
    const size_t never[] = {0, CACHE_LINE - 1, SIZE_MAX, SIZE_MAX / 2,
                            SIZE_MAX - sizeof(shared_page)};
    for (size_t i = 0; i < sizeof never / sizeof never[0]; i++) {
        assert_null(shm_ring_create(never[i]));
    }
    shm_ring_destroy(NULL);
}

static void create_allocates_all_memory_of_the_ring(void **state) {
    (void)state;
    struct stat info;
    shm_ring *ring = shm_ring_create(64 * CAPACITY);
    assert_non_null(ring);
    assert_int_equal(fstat(ring->own.fd, &info), 0);
    assert_true((size_t)info.st_blocks * 512 >= segment_bytes(64 * CAPACITY));
    shm_ring_destroy(ring);
}

/* Descriptors of standard streams must not name a segment: the program prints to them. */
static void create_without_standard_streams(void) {
    for (int stream = 0; stream <= STDERR_FILENO; stream++) {
        (void)close(stream);
    }
    const int before = open_files();
    shm_ring *ring = shm_ring_create(CAPACITY);
    const shm_ring_handle handles[] = {valid_handle, valid_handle};
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

static void segments_avoid_standard_stream_descriptors(void **state) {
    (void)state;
    run_in_child_with_handle(create_without_standard_streams);
}

/* ---- corrupt memory ---- */

static void peek_of_invalid_header_returns_corrupt(void **state) {
    (void)state;
    const message_header wrong[] = {
        {.offset = CAPACITY + CACHE_LINE, .bytes = 0},
        {.offset = UINT64_MAX / CACHE_LINE * CACHE_LINE, .bytes = 1},
        {.offset = 0, .bytes = CAPACITY + 1},
        {.offset = 0, .bytes = UINT64_MAX},
        {.offset = CACHE_LINE, .bytes = CAPACITY - CACHE_LINE + 1},
        {.offset = CACHE_LINE, .bytes = UINT64_MAX - CACHE_LINE + 1},
        {.offset = 1, .bytes = 1},
        {.offset = CAPACITY, .bytes = 1},
    };
    shm_ring_message got;
    peer_commits();
    assert_int_equal(shm_ring_peek(rings[0], 1, &got), SHM_RING_READY);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        rings[1]->own.page->headers[0] = wrong[i];
        assert_int_equal(shm_ring_peek(rings[0], 1, &got), SHM_RING_CORRUPT);
    }
}

static void peek_of_invalid_counter_returns_corrupt(void **state) {
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

/* Uses all functions and asserts that no address is outside of a segment. */
static void use_corrupt_peer(shared_page *theirs) {
    shm_ring_message got;
    const size_t bytes = random_below(CAPACITY + 1);
    const char *buffer = shm_ring_reserve(rings[0], bytes);
    if (buffer != NULL) {
        const size_t at = (size_t)(buffer - data_of(&rings[0]->own));
        assert_true(at <= CAPACITY && bytes <= CAPACITY - at);
        shm_ring_commit(rings[0], 0, NULL);
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

static void random_corruption_stays_within_the_segments(void **state) {
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
            theirs->headers[k] =
                (message_header){.tag = random_below(9), .offset = at, .bytes = bytes};
            memset(&theirs->headers[k].label, (int)random_below(256), sizeof(fct_op_label));
        }
        use_corrupt_peer(theirs);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(connect_accepts_only_the_ring_of_the_handle),
        cmocka_unit_test(connect_refuses_files_that_are_not_rings),
        cmocka_unit_test(create_and_connect_under_resource_limits_fail_cleanly),
        cmocka_unit_test(create_allocates_all_memory_of_the_ring),
        cmocka_unit_test(segments_avoid_standard_stream_descriptors),
        cmocka_unit_test_setup_teardown(peek_of_invalid_header_returns_corrupt, create_two_rings,
                                        destroy_two_rings),
        cmocka_unit_test_setup_teardown(peek_of_invalid_counter_returns_corrupt, create_two_rings,
                                        destroy_two_rings),
        cmocka_unit_test_setup_teardown(random_corruption_stays_within_the_segments,
                                        create_two_rings, destroy_two_rings),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
