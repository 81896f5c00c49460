// cuBLAS and cuBLASLt: handles and descriptors. What computes is a stub that
// counts as a kernel; see unwritten.c.
#include <cublasLt.h>
#include <cublas_v2.h>
#include <stdlib.h>
#include <string.h>

#include "sources/sources.h"
#include "state/account.h"
#include "state/context.h"
#include "state/objects.h"
#include "streams/stream.h"

struct cublasContext {
  void* stream;
  cublasPointerMode_t pointer_mode;
  cublasMath_t math_mode;
  cublasAtomicsMode_t atomics;
  int sm_target;
  int device;
  int64_t charged;
};

static cublasStatus_t handle_create(void** out) {
  if (cudaFree(0)) return CUBLAS_STATUS_NOT_INITIALIZED;
  int device = current_device();
  int64_t bytes = (int64_t)config.device[device].cublas_handle;
  *out = NULL;
  if (injected("cublasCreate", device, 0)) return CUBLAS_STATUS_ALLOC_FAILED;
  if (!charge_first_library(device) || !charge(device, bytes, "cublas"))
    return CUBLAS_STATUS_ALLOC_FAILED;
  struct cublasContext* handle = object_new(OTHER, sizeof *handle);
  handle->device = device;
  handle->charged = bytes;
  *out = handle;
  return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t handle_destroy(void* out) {
  struct cublasContext* handle = out;
  if (!object_is(handle, OTHER)) return CUBLAS_STATUS_NOT_INITIALIZED;
  charge(handle->device, -handle->charged, "cublas");
  object_delete(handle, OTHER);
  return CUBLAS_STATUS_SUCCESS;
}

void* cublas_stream(const void* handle) {
  return object_is(handle, OTHER) ? ((const struct cublasContext*)handle)->stream
                                  : NULL;
}

EXPORT cublasStatus_t cublasCreate(cublasHandle_t* handle) {
  return handle_create((void**)handle);
}
EXPORT cublasStatus_t cublasDestroy(cublasHandle_t handle) {
  return handle_destroy(handle);
}
EXPORT cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  return handle_create((void**)handle);
}
EXPORT cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  return handle_destroy(handle);
}

#define FIELD(Set, Get, type, field)                     \
  EXPORT cublasStatus_t Set(cublasHandle_t h, type v) {  \
    h->field = v;                                        \
    return CUBLAS_STATUS_SUCCESS;                        \
  }                                                      \
  EXPORT cublasStatus_t Get(cublasHandle_t h, type* v) { \
    *v = h->field;                                       \
    return CUBLAS_STATUS_SUCCESS;                        \
  }
FIELD(cublasSetPointerMode, cublasGetPointerMode, cublasPointerMode_t, pointer_mode)
FIELD(cublasSetAtomicsMode, cublasGetAtomicsMode, cublasAtomicsMode_t, atomics)
FIELD(cublasSetMathMode, cublasGetMathMode, cublasMath_t, math_mode)
FIELD(cublasSetSmCountTarget, cublasGetSmCountTarget, int, sm_target)

EXPORT cublasStatus_t cublasSetStream(cublasHandle_t h, cudaStream_t stream) {
  h->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasGetStream(cublasHandle_t h, cudaStream_t* stream) {
  *stream = h->stream;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasSetWorkspace(cublasHandle_t h, void* workspace,
                                         size_t bytes) {
  (void)h, (void)workspace, (void)bytes;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasGetVersion(cublasHandle_t h, int* version) {
  (void)h;
  *version = CUBLAS_VERSION;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
EXPORT size_t cublasLtGetCudartVersion(void) { return CUDART_VERSION; }

static const char* status_text(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED:
      return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED:
      return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
    default:
      return "CUBLAS_STATUS_INTERNAL_ERROR";
  }
}

EXPORT const char* cublasGetStatusName(cublasStatus_t status) {
  return status_text(status);
}
EXPORT const char* cublasGetStatusString(cublasStatus_t status) {
  return status_text(status);
}
EXPORT const char* cublasLtGetStatusString(cublasStatus_t status) {
  return status_text(status);
}

// ---- cuBLASLt descriptors: opaque, so their settings are kept by no one

#define DESCRIPTOR(Create, parameters, Destroy, type)                 \
  EXPORT cublasStatus_t Create parameters {                           \
    *out = calloc(1, 1024);                                           \
    return *out ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED; \
  }                                                                   \
  EXPORT cublasStatus_t Destroy(type descriptor) {                    \
    free(descriptor);                                                 \
    return CUBLAS_STATUS_SUCCESS;                                     \
  }
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
DESCRIPTOR(cublasLtMatmulDescCreate,
           (cublasLtMatmulDesc_t * out, cublasComputeType_t compute,
            cudaDataType_t scale),
           cublasLtMatmulDescDestroy, cublasLtMatmulDesc_t)
DESCRIPTOR(cublasLtMatrixLayoutCreate,
           (cublasLtMatrixLayout_t * out, cudaDataType type, uint64_t rows,
            uint64_t columns, int64_t stride),
           cublasLtMatrixLayoutDestroy, cublasLtMatrixLayout_t)
DESCRIPTOR(cublasLtMatmulPreferenceCreate, (cublasLtMatmulPreference_t * out),
           cublasLtMatmulPreferenceDestroy, cublasLtMatmulPreference_t)
DESCRIPTOR(cublasLtMatrixTransformDescCreate,
           (cublasLtMatrixTransformDesc_t * out, cudaDataType scale),
           cublasLtMatrixTransformDescDestroy, cublasLtMatrixTransformDesc_t)

#define SETTER(name, type, attribute_type)                              \
  EXPORT cublasStatus_t name(type descriptor, attribute_type attribute, \
                             const void* value, size_t bytes) {         \
    return CUBLAS_STATUS_SUCCESS;                                       \
  }
SETTER(cublasLtMatmulDescSetAttribute, cublasLtMatmulDesc_t,
       cublasLtMatmulDescAttributes_t)
SETTER(cublasLtMatrixLayoutSetAttribute, cublasLtMatrixLayout_t,
       cublasLtMatrixLayoutAttribute_t)
SETTER(cublasLtMatmulPreferenceSetAttribute, cublasLtMatmulPreference_t,
       cublasLtMatmulPreferenceAttributes_t)

EXPORT cublasStatus_t cublasLtMatmulAlgoConfigSetAttribute(
    cublasLtMatmulAlgo_t* algo, cublasLtMatmulAlgoConfigAttributes_t attribute,
    const void* value, size_t bytes) {
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(
    const cublasLtMatmulAlgo_t* algo, cublasLtMatmulAlgoConfigAttributes_t attribute,
    void* value, size_t bytes, size_t* written) {
  memset(value, 0, bytes);
  if (written) *written = bytes;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulAlgoInit(cublasLtHandle_t handle,
                                             cublasComputeType_t compute,
                                             cudaDataType_t scale, cudaDataType_t a,
                                             cudaDataType_t b, cudaDataType_t c,
                                             cudaDataType_t d, int id,
                                             cublasLtMatmulAlgo_t* algo) {
  memset(algo, 0, sizeof *algo);
  return CUBLAS_STATUS_SUCCESS;
}

static void heuristic(cublasLtMatmulHeuristicResult_t* result) {
  memset(result, 0, sizeof *result);
  result->state = CUBLAS_STATUS_SUCCESS;
  result->wavesCount = 1;
}

EXPORT cublasStatus_t cublasLtMatmulAlgoCheck(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t compute, cublasLtMatrixLayout_t a,
    cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
    const cublasLtMatmulAlgo_t* algo, cublasLtMatmulHeuristicResult_t* result) {
  heuristic(result);
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t compute, cublasLtMatrixLayout_t a,
    cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
    cublasLtMatmulPreference_t preference, int wanted,
    cublasLtMatmulHeuristicResult_t results[], int* found) {
  *found = MIN(wanted, 1);
  if (*found) heuristic(results);
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle,
                                     cublasLtMatmulDesc_t compute, const void* alpha,
                                     const void* a, cublasLtMatrixLayout_t a_layout,
                                     const void* b, cublasLtMatrixLayout_t b_layout,
                                     const void* beta, const void* c,
                                     cublasLtMatrixLayout_t c_layout, void* d,
                                     cublasLtMatrixLayout_t d_layout,
                                     const cublasLtMatmulAlgo_t* algo, void* workspace,
                                     size_t workspace_bytes, cudaStream_t stream) {
  return stream_run(stream, &(Operation){.kind = NODE_KERNEL})
             ? CUBLAS_STATUS_EXECUTION_FAILED
             : CUBLAS_STATUS_SUCCESS;
}
#pragma GCC diagnostic pop
