/* Loaded in front of the CUDA runtime (LD_PRELOAD): leaves out one of the waits for an event by
 * which fsdp_c's extension orders streams. A seeded bug for races.py, without another build. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <execinfo.h>
#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef int (*wait_function)(void *stream, void *event, unsigned int flags);

enum { DEPTH = 32 };

static long waits;         /* since visit_drop() */
static long dropped = -1;  /* which of them is left out */
static uintptr_t from, to; /* where the extension lies in memory */

static int note_range(struct dl_phdr_info *info, size_t size, void *unused) {
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

static int by_the_extension(void) {
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

/* The runtime that is loaded; torch may have loaded it for itself alone. */
static wait_function real_wait(void) {
    static const char *const names[] = {"libcudart.so.13", "libcudart.so.12"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        void *library = dlopen(names[i], RTLD_LAZY | RTLD_NOLOAD);
        void *found = library != NULL ? dlsym(library, "cudaStreamWaitEvent") : NULL;
        if (found != NULL) {
            return (wait_function)found;
        }
    }
    return (wait_function)dlsym(RTLD_NEXT, "cudaStreamWaitEvent");
}

/* Counts anew; the n-th wait from now on is left out (-1: none). */
void visit_drop(long n) {
    waits = 0;
    dropped = n;
    dl_iterate_phdr(&note_range, NULL);
}

long visit_waits(void) {
    return waits;
}

int cudaStreamWaitEvent(void *stream, void *event, unsigned int flags) {
    static wait_function wait;
    if (to != 0 && by_the_extension() && waits++ == dropped) {
        return 0;
    }
    if (wait == NULL) {
        wait = real_wait();
    }
    return wait != NULL ? wait(stream, event, flags) : 999;
}
