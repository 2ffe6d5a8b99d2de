/* LD_PRELOAD library that drops one cudaStreamWaitEvent call of fsdp_c's extension. A call is one
 * of the extension if a frame of the extension is among the innermost DEPTH frames.
 * dropped_waits.py uses it as a seeded bug: no separate build of the extension is needed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <execinfo.h>
#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef int (*wait_function)(void *stream, void *event, unsigned int flags);

enum { DEPTH = 32 };

static _Atomic long waits;        /* calls of the extension since drop_wait(), in all threads */
static _Atomic long dropped = -1; /* index of the call to drop; -1: none */
static uintptr_t from, to;        /* address range of the extension */

static int find_extension(struct dl_phdr_info *info, size_t size, void *unused) {
    (void)size;
    (void)unused;
    if (strstr(info->dlpi_name, "fsdp_c/_C.") == NULL) {
        return 0;
    }
    from = info->dlpi_addr;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const uintptr_t end = from + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz;
        to = end > to ? end : to;
    }
    return 1;
}

static int is_called_by_extension(void) {
    void *frames[DEPTH];
    const int depth = backtrace(frames, DEPTH);
    for (int i = 0; i < depth; i++) {
        const uintptr_t address = (uintptr_t)frames[i];
        if (address >= from && address < to) {
            return 1;
        }
    }
    return 0;
}

/* Returns the real function of the loaded runtime. torch may load the runtime with RTLD_LOCAL, so
 * RTLD_NEXT alone may not find it. */
static wait_function real_wait(void) {
    static const char *const names[] = {"libcudart.so.13", "libcudart.so.12"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        void *library = dlopen(names[i], RTLD_LAZY | RTLD_NOLOAD);
        void *function = library != NULL ? dlsym(library, "cudaStreamWaitEvent") : NULL;
        if (function != NULL) {
            return (wait_function)function;
        }
    }
    return (wait_function)dlsym(RTLD_NEXT, "cudaStreamWaitEvent");
}

/* Resets the counter. The wait with index n from now on is dropped; -1: none. */
void drop_wait(long n) {
    waits = 0;
    dropped = n;
    dl_iterate_phdr(&find_extension, NULL);
}

long count_waits(void) {
    return waits;
}

int cudaStreamWaitEvent(void *stream, void *event, unsigned int flags) {
    static wait_function wait;
    if (to != 0 && is_called_by_extension() && waits++ == dropped) {
        return 0;
    }
    if (wait == NULL) {
        wait = real_wait();
    }
    return wait != NULL ? wait(stream, event, flags) : 999;
}
