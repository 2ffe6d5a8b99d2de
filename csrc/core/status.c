/* Message of a status code; see status.h. Owns nothing. */
#include "status.h"

#include <assert.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static bool is_continuation(char byte) {
    return ((unsigned char)byte & 0xC0) == 0x80;
}

const char *fc_text_trim_start(const char *text) {
    assert(text != NULL);
    while (is_continuation(*text)) {
        text++;
    }
    return text;
}

void fc_text_trim_end(char *text) {
    assert(text != NULL);
    size_t last = strlen(text);
    size_t present = 0; /* bytes of the last character */
    while (last > 0 && present == 0) {
        last--;
        present = is_continuation(text[last]) ? 0 : strlen(text + last);
    }
    const unsigned char first = (unsigned char)text[last];
    const size_t expected = first < 0x80 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    if (present < expected) {
        text[last] = '\0';
    }
}

fc_status fc_error_set(fc_error *err, fc_status code, const char *format, ...) {
    assert(code != FC_OK);
    if (err != NULL) {
        va_list args;
        va_start(args, format);
        const int length = vsnprintf(err->message, sizeof err->message, format, args);
        va_end(args);
        if (length >= (int)sizeof err->message) {
            fc_text_trim_end(err->message);
        }
    }
    return code;
}
