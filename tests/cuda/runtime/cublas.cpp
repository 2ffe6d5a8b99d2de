/* Substitute of libcublas and libcublasLt: every product is one launch, on the stream of the handle
 * or of the call. torch's operators declare the accesses (operators.cpp). */
#include <cublasLt.h>
#include <cublas_v2.h>

#include "sim.h"

namespace {

struct Handle {
    cudaStream_t stream = nullptr;
};

cublasStatus_t launch(cudaStream_t stream, const char *name) {
    sim::Operation by;
    return sim::launch(sim::stream_of(stream), name, &by) == 0 ? CUBLAS_STATUS_SUCCESS
                                                               : CUBLAS_STATUS_EXECUTION_FAILED;
}

cublasStatus_t launch(cublasHandle_t handle, const char *name) {
    return launch(reinterpret_cast<const Handle *>(handle)->stream, name);
}

} // namespace

extern "C" {

cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) {
    *handle = reinterpret_cast<cublasHandle_t>(new Handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
    delete reinterpret_cast<Handle *>(handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
    reinterpret_cast<Handle *>(handle)->stream = stream;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetMathMode(cublasHandle_t, cublasMath_t *mode) {
    *mode = CUBLAS_DEFAULT_MATH;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int, int,
                            int, const void *, const void *, cudaDataType, int, const void *,
                            cudaDataType, int, const void *, void *, cudaDataType, int,
                            cublasComputeType_t, cublasGemmAlgo_t) {
    return launch(handle, "cublasGemmEx");
}

cublasStatus_t cublasSgemm_v2(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int, int,
                              int, const float *, const float *, int, const float *, int,
                              const float *, float *, int) {
    return launch(handle, "cublasSgemm");
}

cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t handle, cublasOperation_t,
                                         cublasOperation_t, int, int, int, const float *,
                                         const float *, int, long long, const float *, int,
                                         long long, const float *, float *, int, long long, int) {
    return launch(handle, "cublasSgemmStridedBatched");
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t,
                                          cublasOperation_t, int, int, int, const void *,
                                          const void *, cudaDataType, int, long long, const void *,
                                          cudaDataType, int, long long, const void *, void *,
                                          cudaDataType, int, long long, int, cublasComputeType_t,
                                          cublasGemmAlgo_t) {
    return launch(handle, "cublasGemmStridedBatchedEx");
}

cublasStatus_t cublasSdot_v2(cublasHandle_t handle, int, const float *, int, const float *, int,
                             float *) {
    return launch(handle, "cublasSdot");
}

cublasStatus_t cublasSgemv_v2(cublasHandle_t handle, cublasOperation_t, int, int, const float *,
                              const float *, int, const float *, int, const float *, float *, int) {
    return launch(handle, "cublasSgemv");
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    *handle = reinterpret_cast<cublasLtHandle_t>(new Handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int,
                                              cublasLtMatmulHeuristicResult_t *results,
                                              int *count) {
    results[0] = {};
    *count = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void *, const void *,
                              cublasLtMatrixLayout_t, const void *, cublasLtMatrixLayout_t,
                              const void *, const void *, cublasLtMatrixLayout_t, void *,
                              cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t *, void *, size_t,
                              cudaStream_t stream) {
    return launch(stream, "cublasLtMatmul");
}
}
