/* Status codes of the core and the error message that belongs to them. A function of the core's
 * headers that can fail returns fc_status and is marked FC_CHECK. Exceptions: fc_recorder_write
 * sets errno, fc_reduction_new returns NULL, and checksum.h returns a kernel's message. */
#ifndef FSDP_C_CORE_STATUS_H
#define FSDP_C_CORE_STATUS_H

#include <stddef.h>

/* X(name, value, exception that csrc/python raises) */
#define FC_STATUS_MAP(X)                                                                           \
    X(FC_OK, 0, "no exception")                                                                    \
    X(FC_ERAISED, -1, "the exception of csrc/bridge or a callback")                                \
    X(FC_ENOMEM, -2, "MemoryError")                                                                \
    X(FC_ESTATE, -3, "RuntimeError")                                                               \
    X(FC_EASSERT, -4, "AssertionError")                                                            \
    X(FC_EVALUE, -5, "ValueError")

typedef enum fc_status {
#define FC_STATUS_ENUM(name, value, raises) name = value,
    FC_STATUS_MAP(FC_STATUS_ENUM)
#undef FC_STATUS_ENUM
} fc_status;

#if defined(__GNUC__)
#define FC_CHECK __attribute__((warn_unused_result))
#define FC_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define FC_CHECK
#define FC_PRINTF(fmt, args)
#endif

/* Evaluates a core call and jumps to `done:` if it fails. Requires a local variable `fc_status
 * status`. */
#define FC_TRY(call)                                                                               \
    do {                                                                                           \
        status = (call);                                                                           \
        if (status != FC_OK) {                                                                     \
            goto done;                                                                             \
        }                                                                                          \
    } while (0)

/* Like FC_TRY, for a call of csrc/bridge or of fc_callbacks, which returns 0, or -1 with a Python
 * exception set. */
#define FC_TRY_RAISED(call)                                                                        \
    do {                                                                                           \
        if ((call) != 0) {                                                                         \
            status = FC_ERAISED;                                                                   \
            goto done;                                                                             \
        }                                                                                          \
    } while (0)

/* Drops the status of a call that cannot fail, or that may fail without an effect on the caller. */
#define FC_IGNORE(call) ((void)!(call))

/* Storage for the message of a failure. The caller owns the storage. Each comm context has one
 * fc_error for all of its groups. */
typedef struct fc_error {
    char message[512];
} fc_error;

/* For UTF-8 text that was cut. trim_start: returns the address after the rest of an incomplete
 * character at the start. trim_end: removes an incomplete character from the end. */
const char *fc_text_trim_start(const char *text);
void fc_text_trim_end(char *text);

/* Formats the message into `err`, truncated to its size, and returns `code`. `err` may be NULL.
 * Precondition: `code` is not FC_OK. */
fc_status fc_error_set(fc_error *err, fc_status code, const char *format, ...) FC_PRINTF(3, 4);

#endif
