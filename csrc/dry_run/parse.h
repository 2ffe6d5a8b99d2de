/* Converts Python objects to a description and calls of a dry run. */
#ifndef FSDP_C_DRY_RUN_PARSE_H
#define FSDP_C_DRY_RUN_PARSE_H

#include "step.h"

struct _object; /* CPython's PyObject */

/* Memory of a parsed description. Strings are borrowed from the Python objects, which the caller
 * must not change. */
typedef struct fcd_parsed {
    fcd_description description;
    fcd_call *calls; /* [call_count] owned */
    size_t call_count;
    struct fcd_block *blocks; /* owned arrays */
} fcd_parsed;

/* Parses `units` and `states`, lists of dicts, and `calls`, a list of tuples. Runs no Python code,
 * except for repr() of an invalid item. Returns 0, or -1 with ValueError, whose message names the
 * item, or MemoryError. The caller calls fcd_parsed_fini() in any case. */
int fcd_parse(struct _object *units, struct _object *states, struct _object *calls, bool streams,
              fcd_parsed *out);
void fcd_parsed_fini(fcd_parsed *p);

#endif
