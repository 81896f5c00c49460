// What NCCL says when a call fails.
#include <stdarg.h>

#include "sources/communicator.h"

static char last_error[512];

ncclResult_t nccl_fail(ncclResult_t result, const char* format, ...) {
  va_list list;
  va_start(list, format);
  vsnprintf(last_error, sizeof last_error, format, list);
  va_end(list);
  message("NCCL: %s", last_error);
  return result;
}

EXPORT const char* ncclGetLastError(ncclComm_t comm) {
  (void)comm;
  return last_error;
}

EXPORT const char* ncclGetErrorString(ncclResult_t result) {
  static const char* const text[] = {"no error",
                                     "unhandled cuda error (run with NCCL_DEBUG=INFO "
                                     "for details)",
                                     "unhandled system error (run with NCCL_DEBUG=INFO "
                                     "for details)",
                                     "internal error - please report this issue to the "
                                     "NCCL developers",
                                     "invalid argument (run with NCCL_DEBUG=WARN for "
                                     "details)",
                                     "invalid usage (run with NCCL_DEBUG=WARN for "
                                     "details)",
                                     "remote process exited or there was a network "
                                     "error",
                                     "NCCL operation in progress"};
  bool known = result >= 0 && (size_t)result < sizeof text / sizeof *text;
  return known ? text[result] : "unknown result code";
}

ncclResult_t nccl_cuda(CUresult error) {
  if (!error) return ncclSuccess;
  return nccl_fail(ncclUnhandledCudaError, "%s",
                   cudaGetErrorString((cudaError_t)error));
}
