// Errors: the last one of a thread, the one that ends all, and their names.
#include "state/context.h"

int sticky;

static __thread cudaError_t last_error;

void sticky_error(int error) { __atomic_store_n(&sticky, error, __ATOMIC_RELAXED); }

cudaError_t rt_leave(cudaError_t error) {
  if (error) last_error = error;
  return error;
}

EXPORT cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return sticky ? (cudaError_t)sticky : error;
}

EXPORT cudaError_t cudaPeekAtLastError(void) {
  return sticky ? (cudaError_t)sticky : last_error;
}

static const struct {
  int code;
  const char *runtime, *driver, *text;
} errors[] = {
    {0, "cudaSuccess", "CUDA_SUCCESS", "no error"},
    {1, "cudaErrorInvalidValue", "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "cudaErrorInitializationError", "CUDA_ERROR_NOT_INITIALIZED",
     "initialization error"},
    {4, "cudaErrorCudartUnloading", "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {98, "cudaErrorInvalidDeviceFunction", "CUDA_ERROR_UNKNOWN",
     "invalid device function"},
    {100, "cudaErrorNoDevice", "CUDA_ERROR_NO_DEVICE",
     "no CUDA-capable device is detected"},
    {101, "cudaErrorInvalidDevice", "CUDA_ERROR_INVALID_DEVICE",
     "invalid device ordinal"},
    {201, "cudaErrorDeviceUninitialized", "CUDA_ERROR_INVALID_CONTEXT",
     "invalid device context"},
    {217, "cudaErrorPeerAccessUnsupported", "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
     "peer access is not supported between these two devices"},
    {400, "cudaErrorInvalidResourceHandle", "CUDA_ERROR_INVALID_HANDLE",
     "invalid resource handle"},
    {500, "cudaErrorSymbolNotFound", "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "cudaErrorNotReady", "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "cudaErrorIllegalAddress", "CUDA_ERROR_ILLEGAL_ADDRESS",
     "an illegal memory access was encountered"},
    {712, "cudaErrorHostMemoryAlreadyRegistered",
     "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {713, "cudaErrorHostMemoryNotRegistered", "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {719, "cudaErrorLaunchFailure", "CUDA_ERROR_LAUNCH_FAILED",
     "unspecified launch failure"},
    {800, "cudaErrorNotPermitted", "CUDA_ERROR_NOT_PERMITTED",
     "operation not permitted"},
    {801, "cudaErrorNotSupported", "CUDA_ERROR_NOT_SUPPORTED",
     "operation not supported"},
    {900, "cudaErrorStreamCaptureUnsupported", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {901, "cudaErrorStreamCaptureInvalidated", "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {902, "cudaErrorStreamCaptureMerge", "CUDA_ERROR_STREAM_CAPTURE_MERGE",
     "operation would result in a merge of separate capture sequences"},
    {903, "cudaErrorStreamCaptureUnmatched", "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
     "capture was not ended in the same stream as it began"},
    {904, "cudaErrorStreamCaptureUnjoined", "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
     "capturing stream has unjoined work"},
    {905, "cudaErrorStreamCaptureIsolation", "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
    {906, "cudaErrorStreamCaptureImplicit", "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {908, "cudaErrorStreamCaptureWrongThread", "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {999, "cudaErrorUnknown", "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static int error_index(int code) {
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].code == code) return (int)i;
  return -1;
}

EXPORT const char* cudaGetErrorName(cudaError_t error) {
  int i = error_index(error);
  return i < 0 ? "unrecognized error code" : errors[i].runtime;
}

EXPORT const char* cudaGetErrorString(cudaError_t error) {
  int i = error_index(error);
  return i < 0 ? "unrecognized error code" : errors[i].text;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char** name) {
  int i = error_index(error);
  *name = i < 0 ? NULL : errors[i].driver;
  return i < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  int i = error_index(error);
  *text = i < 0 ? NULL : errors[i].text;
  return i < 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
