/* Callbacks for the end of backward, which the core registers with fct_autograd_at_end(). The other
 * functions of boundary_device.c are those of csrc/bridge, transport/transport.h and
 * kernels/kernels.h. */
#ifndef FSDP_C_DRY_RUN_BOUNDARY_DEVICE_H
#define FSDP_C_DRY_RUN_BOUNDARY_DEVICE_H

#include "record.h"

/* run runs and removes the callbacks for the end of backward. run returns 0, or the first result
 * that is not 0. drop removes the callbacks without a call. */
int fcd_run_end_callbacks(void);
void fcd_drop_end_callbacks(void);

#endif
