// Counting calls: those that are implemented, and those that are not. Of these a
// library or a header names some, which have a stub each; a program asks for others
// by a name that no one knows.
#include "state/calls.h"

#include <fnmatch.h>
#include <stdlib.h>
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

// A slot for each place that enters a call, found by the address of its name.
static struct {
  const char* name;
  uint64_t times;
} made[1 << 10];

void call_made(const char* name) {
  const size_t slots = sizeof made / sizeof *made;
  size_t i = ((uintptr_t)name >> 3) % slots;
  for (size_t tried = 0; tried < slots; tried++, i = (i + 1) % slots) {
    const char* there = NULL;
    if (__atomic_compare_exchange_n(&made[i].name, &there, name, false,
                                    __ATOMIC_RELAXED, __ATOMIC_RELAXED) ||
        there == name) {
      __atomic_fetch_add(&made[i].times, 1, __ATOMIC_RELAXED);
      return;
    }
  }
  abort();  // More calls are implemented than there are slots.
}

uint64_t calls_made(const char* pattern) {
  uint64_t times = 0;
  for (size_t i = 0; i < sizeof made / sizeof *made; i++) {
    const char* name = __atomic_load_n(&made[i].name, __ATOMIC_RELAXED);
    if (name && !fnmatch(pattern, name, 0))
      times += __atomic_load_n(&made[i].times, __ATOMIC_RELAXED);
  }
  return times;
}
