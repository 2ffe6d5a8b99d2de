/* Message of a status code; see status.h. Owns nothing. */
#include "status.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>

fc_status fc_error_set(fc_error *err, fc_status code, const char *format, ...) {
    assert(code != FC_OK);
    if (err != NULL) {
        va_list args;
        va_start(args, format);
        (void)vsnprintf(err->message, sizeof err->message, format, args);
        va_end(args);
    }
    return code;
}
