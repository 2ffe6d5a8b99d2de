/* The calls of a dry run: the actions of a model's hooks and of autograd, in the order of a step.
 */
#ifndef FSDP_C_DRY_RUN_STEP_H
#define FSDP_C_DRY_RUN_STEP_H

#include "model.h"

/* X(enumerator, name, number of arguments). The arguments of the calls:
 *   pre_forward, post_forward, pre_backward, post_backward    state
 *   backward      backward begins
 *   end           backward ends; the callbacks for the end of backward run
 *   alloc         storage of the model, bytes
 *   free          storage of the model; no effect if it became a gradient
 *   gradient      unit, parameter of the unit, storage of the model (-1: none), bytes: autograd
 *                 accumulates a gradient in that storage, which then has `bytes` bytes and is
 *                 counted as memory of gradients
 *   zero_grad     the sharded parameters lose their gradients */
#define FCD_CALLS(X)                                                                               \
    X(FCD_CALL_PRE_FORWARD, "pre_forward", 1)                                                      \
    X(FCD_CALL_POST_FORWARD, "post_forward", 1)                                                    \
    X(FCD_CALL_BACKWARD, "backward", 0)                                                            \
    X(FCD_CALL_PRE_BACKWARD, "pre_backward", 1)                                                    \
    X(FCD_CALL_POST_BACKWARD, "post_backward", 1)                                                  \
    X(FCD_CALL_END, "end", 0)                                                                      \
    X(FCD_CALL_ALLOC, "alloc", 2)                                                                  \
    X(FCD_CALL_FREE, "free", 1)                                                                    \
    X(FCD_CALL_GRADIENT, "gradient", 4)                                                            \
    X(FCD_CALL_ZERO_GRAD, "zero_grad", 0)

typedef enum fcd_call_kind {
#define FCD_CALL_ENUM(name, text, arguments) name,
    FCD_CALLS(FCD_CALL_ENUM)
#undef FCD_CALL_ENUM
        FCD_CALL_COUNT
} fcd_call_kind;

enum { FCD_ARGUMENTS_MAX = 4 };

typedef struct fcd_call {
    fcd_call_kind kind;
    int64_t arguments[FCD_ARGUMENTS_MAX];
} fcd_call;

extern const char *const fcd_call_names[FCD_CALL_COUNT];
extern const int fcd_call_arguments[FCD_CALL_COUNT];

/* Runs one call. Returns FC_EVALUE if an argument is out of range or the call is not possible now.
 * After a failure m->error has a message, and only fcd_model_fini() may follow. */
FC_CHECK fc_status fcd_model_call(fcd_model *m, const fcd_call *call);

#endif
