/* Executes torch's operators for CUDA tensors on the host. */
#ifndef CUDA_SIM_OPERATORS_ON_HOST_H
#define CUDA_SIM_OPERATORS_ON_HOST_H

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

#include "sim.h"

namespace sim {

/* Returns the work of a CUDA operator that has returned `outputs`. The operator's CPU kernel runs
 * on tensors that alias the memory of the arguments. Its results are copied into the outputs. An
 * operator that has no CPU kernel is reported. */
Work operator_work(const c10::OperatorHandle &handle, const std::string &name,
                   const std::vector<c10::IValue> &arguments,
                   const std::vector<c10::IValue> &outputs);

} // namespace sim

#endif
