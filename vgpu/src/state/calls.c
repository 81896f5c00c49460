// Counting calls that are not implemented: those a library or a header names, which
// have a stub each, and those a program asks for by a name that no one knows.
#include "state/calls.h"

#include <string.h>

#include "state/state.h"

int call_error(const char* name) {
  if (!strncmp(name, "nvml", 4)) return 3;     // NVML_ERROR_NOT_SUPPORTED
  if (!strncmp(name, "cublas", 6)) return 15;  // CUBLAS_STATUS_NOT_SUPPORTED
  if (!strncmp(name, "nccl", 4)) return 5;     // ncclInvalidUsage
  return CUDA_ERROR_NOT_SUPPORTED;
}

void call_count(uint32_t* counter) { __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

int late_index(const char* name) {
  if (!state_init()) return -1;
  int i = 0;
  state_lock();
  while (i < MAX_LATE_CALLS && self->late_call[i][0] &&
         strcmp(self->late_call[i], name))
    i++;
  if (i < MAX_LATE_CALLS) snprintf(self->late_call[i], NAME_BYTES, "%s", name);
  state_unlock();
  return i < MAX_LATE_CALLS ? i : -1;
}

CUresult not_implemented(const char* name) {
  int i = late_index(name);
  if (i >= 0) call_count(&self->late_calls[i]);
  return CUDA_ERROR_NOT_SUPPORTED;
}

int late_stub(int index) {
  if (!state_init()) return CUDA_ERROR_NOT_SUPPORTED;
  call_count(&self->late_calls[index]);
  return call_error(self->late_call[index]);
}
