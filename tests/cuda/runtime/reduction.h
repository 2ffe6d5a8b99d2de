/* The arithmetic of NCCL's reductions. The functions that compute have no effect on float8. */
#ifndef CUDA_SIM_REDUCTION_H
#define CUDA_SIM_REDUCTION_H

#include <nccl.h>

#include <cstddef>
#include <vector>

namespace sim {

size_t size_of(ncclDataType_t type);

/* Returns the value of one element, for the parameter `factor` of scale(). */
double read_scalar(ncclDataType_t type, const void *scalar);

/* Multiplies each element by the factor, in the type. */
void scale(ncclDataType_t type, void *data, size_t count, double factor);

/* Divides each element of an integer type by the number of ranks. No effect on other types, whose
 * average is the sum of scaled elements. */
void divide_integers(ncclDataType_t type, void *data, size_t count, size_t world);

/* Writes the reduction of `count` elements of all ranks. The order is that of the ranks, and each
 * partial result is rounded to the type. ncclAvg and PreMulSum are reduced as ncclSum; scale() has
 * scaled their inputs. `inputs` has one address per rank; `result` may be one of them. */
void reduce(ncclDataType_t type, ncclRedOp_t op, const std::vector<const void *> &inputs,
            void *result, size_t count);

} // namespace sim

#endif
