/* Pool of CPU buffers on a system whose pages have 64 KiB, as Arm systems may have. Includes
 * pool_cpu.c, whose system calls are simulated. */
#define _DEFAULT_SOURCE 1 /* MAP_ANONYMOUS */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <sys/mman.h>
#include <unistd.h>

enum { KIB = 1 << 10, MIB = 1 << 20, PAGE_BYTES = 64 * KIB };

static size_t mapped_bytes;

static size_t whole_pages(size_t bytes) {
    return (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

static long simulated_sysconf(int name) {
    assert_int_equal(name, _SC_PAGESIZE);
    return PAGE_BYTES;
}

/* Returns whole pages, one page above a multiple of 2 MiB. */
static void *simulated_mmap(void *hint, size_t bytes, int protection, int flags, int fd,
                            off_t offset) {
    const size_t whole = whole_pages(bytes), reserved = whole + 2 * MIB + PAGE_BYTES;
    char *start = (char *)mmap(hint, reserved, protection, flags, fd, offset);
    assert_ptr_not_equal(start, MAP_FAILED);
    const size_t before = 2 * MIB - (uintptr_t)start % (2 * MIB) + PAGE_BYTES;
    assert_int_equal(munmap(start, before), 0);
    assert_true(before + whole == reserved ||
                munmap(start + before + whole, reserved - before - whole) == 0);
    mapped_bytes += whole;
    return start + before;
}

/* Refuses an address inside of a page. */
static int simulated_munmap(void *address, size_t bytes) {
    if ((uintptr_t)address % PAGE_BYTES != 0) {
        return -1;
    }
    mapped_bytes -= whole_pages(bytes);
    return munmap(address, whole_pages(bytes));
}

#define sysconf simulated_sysconf
#define mmap simulated_mmap
#define munmap simulated_munmap
#include "kernels/pool_cpu.c"

static void all_memory_of_a_block_is_unmapped_with_large_pages(void **state) {
    (void)state;
    const size_t sizes[] = {PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES - 4 * KIB,
                            4 * MIB,    5 * MIB + 1,    7 * MIB - KIB};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        fck_block *block = fck_pool_take(sizes[i]);
        assert_non_null(block);
        assert_true(block->bytes >= sizes[i]);
        assert_int_equal((uintptr_t)block->data % (sizes[i] < 4 * MIB ? PAGE_BYTES : 2 * MIB), 0);
        assert_int_equal(mapped_bytes, whole_pages(sizes[i]));
        fck_pool_give(block);
        fck_pool_trim();
        assert_int_equal(mapped_bytes, 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_memory_of_a_block_is_unmapped_with_large_pages),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
