/* Launches of CUDA kernels (csrc/kernels/launcher.cuh): arguments of many tensors, checksums of
 * device memory, captures and errors. With -DFCK_TEST_CUDA_ON_HOST, and linked with kernels_cuda.cu
 * compiled against fake_cuda/cuda_runtime.h, the kernels run on the host. Otherwise the only test
 * is that of a build without nvcc. */
#include "kernels_reference.h"

#ifdef FCK_TEST_CUDA_ON_HOST
/* fake_cuda/cuda_runtime.h */
extern int fake_cuda_earlier_error, fake_cuda_rejects_launches, fake_cuda_rejects_large,
    fake_cuda_captures, fake_cuda_launches, fake_cuda_errors_read;

/* ---- checksums of device memory ---- */

enum { SUM_BYTES = 5 * 8 * 256 * 512 / 4 }; /* more than one word per thread of a launch */

static uint64_t checksum_of(const void *data, int64_t bytes, uint64_t factor) {
    uint64_t sum = 0;
    const fck_range range = {data, bytes, factor};
    assert_null(fck_cuda()->add_checksums(&range, 1, &sum, NULL));
    return sum;
}

static void checksum_of_each_changed_byte_differs(void **state) {
    (void)state;
    static uint64_t words[100];
    unsigned char *data = (unsigned char *)words;
    for (int64_t bytes = 1; bytes < 800; bytes += bytes < 20 ? 1 : 97) {
        const uint64_t right = checksum_of(data, bytes, 1);
        for (int64_t i = 0; i < bytes; i++) {
            data[i] ^= (unsigned char)(1U << i % 8);
            assert_true(checksum_of(data, bytes, 1) != right);
            data[i] ^= (unsigned char)(1U << i % 8);
        }
        data[bytes] ^= 1; /* behind the range */
        assert_true(checksum_of(data, bytes, 1) == right);
        data[bytes] ^= 1;
    }
}

static void checksum_depends_on_the_order_of_words(void **state) {
    (void)state;
    uint64_t words[] = {1, 2, 3, 4};
    const uint64_t right = checksum_of(words, sizeof words, 1);
    words[1] = 3;
    words[2] = 2;
    assert_true(checksum_of(words, sizeof words, 1) != right);
}

static void launch_adds_each_range_times_its_factor(void **state) {
    (void)state;
    unsigned char *data = (unsigned char *)calloc(1, SUM_BYTES);
    for (int64_t i = 0; i < SUM_BYTES; i++) {
        data[i] = (unsigned char)(i * 7 >> 3);
    }
    const fck_range ranges[] = {{data, SUM_BYTES, 1}, {data + 80, 4095, UINT64_MAX - 1}};
    uint64_t sum = 5;
    assert_null(fck_cuda()->add_checksums(ranges, 2, &sum, NULL));
    assert_true(sum == 5 + checksum_of(data, SUM_BYTES, 1) - 2 * checksum_of(data + 80, 4095, 1));
    assert_null(fck_cuda()->add_checksums(&(fck_range){data, 0, 1}, 1, NULL, NULL));
    assert_non_null(fck_cuda()->add_checksums(&(fck_range){data + 4, 8, 1}, 1, &sum, NULL));
    free(data);
}

static void failed_query_of_a_capture_counts_as_a_capture(void **state) {
    (void)state;
    fake_cuda_earlier_error = 719;
    assert_int_equal(fck_cuda()->is_capturing(NULL), 1);
    fake_cuda_earlier_error = 0;
    assert_int_equal(fck_cuda()->is_capturing(NULL), 0);
}

/* ---- launches of many tensors ---- */

enum { MANY = 700, LARGE = 629, SMALL = 78 }; /* jobs of a list, of a large and a small batch */
/* Launches of MANY jobs without large batches: LARGE jobs in small batches, and the rest. */
enum { SMALL_LAUNCHES = (LARGE + SMALL - 1) / SMALL + 1 };

static unsigned char many_bytes[MANY * 40];

/* Packs MANY segments of different sizes. `expected` gets the right contents of `many_bytes`. */
static const char *pack_many(unsigned char expected[MANY * 40]) {
    static unsigned char from[MANY * 40];
    static fck_segment segments[MANY];
    memset(many_bytes, 0, sizeof many_bytes);
    memset(expected, 0, sizeof many_bytes);
    for (int i = 0; i < MANY; i++) {
        const int64_t size = 1 + i % 39;
        segments[i] =
            (fck_segment){from + i * 40, many_bytes + i * 40, size, 1, FCK_UINT8, FCK_UINT8};
        memset(from + i * 40, i % 255 + 1, 40);
        memset(expected + i * 40, i % 255 + 1, (size_t)size);
    }
    return fck_cuda()->pack(segments, MANY, NULL);
}

/* Packs MANY segments, checks the bytes, and returns the number of launches. */
static int launches_of_many(void) {
    static unsigned char expected[MANY * 40];
    fake_cuda_launches = 0;
    assert_null(pack_many(expected));
    assert_memory_equal(many_bytes, expected, sizeof many_bytes);
    return fake_cuda_launches;
}

/* The first test with many tensors, because the first launch of the process loads a kernel. */
static void many_tensors_need_large_batches_only_after_the_first_launch(void **state) {
    (void)state;
    assert_int_equal(launches_of_many(), SMALL_LAUNCHES);
    assert_int_equal(launches_of_many(), 2); /* LARGE jobs, and the rest */
}

/* The large launch and the small ones fail, so large arguments are not the reason. */
static void failed_launches_do_not_end_large_batches(void **state) {
    (void)state;
    static unsigned char expected[MANY * 40];
    fake_cuda_rejects_launches = 1;
    fake_cuda_errors_read = 0;
    assert_non_null(pack_many(expected));
    fake_cuda_rejects_launches = 0;
    assert_int_equal(fake_cuda_errors_read, 2); /* of a large and a small launch */
    assert_int_equal(launches_of_many(), 2);
}

static void captured_launches_have_small_arguments(void **state) {
    (void)state;
    fake_cuda_captures = 1;
    assert_int_equal(launches_of_many(), SMALL_LAUNCHES);
    fake_cuda_captures = 0;
    assert_int_equal(launches_of_many(), 2);
}

/* The last test with large batches, because a rejection holds for the rest of the process. */
static void launch_rejected_with_large_arguments_is_repeated_with_small_ones(void **state) {
    (void)state;
    fake_cuda_rejects_large = 1;
    assert_int_equal(launches_of_many(), SMALL_LAUNCHES);
    fake_cuda_errors_read = 0;
    assert_int_equal(launches_of_many(), SMALL_LAUNCHES);
    assert_int_equal(fake_cuda_errors_read, 0); /* no large batch was launched again */
    fake_cuda_rejects_large = 0;
}

/* ---- asynchronous errors of earlier operations ---- */

static const char *pack_one(int64_t count) {
    static float from[8], to[8];
    const fck_segment segment = {from, to, count, sizeof *from, FCK_FLOAT32, FCK_FLOAT32};
    return fck_cuda()->pack(&segment, 1, NULL);
}

/* The driver returns an asynchronous error from every later call. The launch has not failed, and
 * the error stays for torch to report. */
static void launch_reports_earlier_asynchronous_error_as_such(void **state) {
    (void)state;
    fake_cuda_errors_read = 0;
    fake_cuda_earlier_error = 719;
    const char *failure = pack_one(8);
    fake_cuda_earlier_error = 0;
    assert_non_null(failure);
    assert_string_equal(failure, "an operation before it has failed: unspecified launch failure");
    assert_int_equal(fake_cuda_errors_read, 0);
    assert_null(pack_one(8));
}

static void launch_clears_its_own_error(void **state) {
    (void)state;
    fake_cuda_errors_read = 0;
    fake_cuda_rejects_launches = 1;
    const char *failure = pack_one(8);
    fake_cuda_rejects_launches = 0;
    assert_non_null(failure);
    assert_string_equal(failure, "invalid configuration argument");
    assert_int_equal(fake_cuda_errors_read, 1);
}
#else

/* ---- a build without nvcc ---- */

static void cuda_launch_without_nvcc_build_names_remedy(void **state) {
    (void)state;
    assert_int_equal(fck_cuda_built(), 0);
    const fck_backend *cuda = fck_cuda();
    assert_string_equal(cuda->name, "cuda");
    const char *const messages[] = {
        cuda->pack(NULL, 0, NULL),
        cuda->unpack(NULL, 0, 1, NULL, 0, NULL),
        cuda->pack_gradients(NULL, 0, 1, NULL, 0, FCK_FLOAT32, NULL),
    };
    for (size_t i = 0; i < 3; i++) {
        assert_non_null(messages[i]);
        assert_non_null(strstr(messages[i], "nvcc"));
    }
}
#endif

int main(void) {
    const struct CMUnitTest tests[] = {
#ifdef FCK_TEST_CUDA_ON_HOST
        cmocka_unit_test(checksum_of_each_changed_byte_differs),
        cmocka_unit_test(checksum_depends_on_the_order_of_words),
        cmocka_unit_test(launch_adds_each_range_times_its_factor),
        cmocka_unit_test(failed_query_of_a_capture_counts_as_a_capture),
        cmocka_unit_test(many_tensors_need_large_batches_only_after_the_first_launch),
        cmocka_unit_test(failed_launches_do_not_end_large_batches),
        cmocka_unit_test(captured_launches_have_small_arguments),
        cmocka_unit_test(launch_rejected_with_large_arguments_is_repeated_with_small_ones),
        cmocka_unit_test(launch_reports_earlier_asynchronous_error_as_such),
        cmocka_unit_test(launch_clears_its_own_error),
#else
        cmocka_unit_test(cuda_launch_without_nvcc_build_names_remedy),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
