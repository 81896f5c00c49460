// Calls nobody wrote. Each has a stub under its name, generated from the symbol
// lists of what is installed, or one made when its name is asked for.
#include "calls.h"

#include <dlfcn.h>
#include <string.h>

#include "vgpu.h"

static int error_code(const char* name) {
  if (!strncmp(name, "nvml", 4)) return 3;     // NVML_ERROR_NOT_SUPPORTED
  if (!strncmp(name, "cublas", 6)) return 15;  // CUBLAS_STATUS_NOT_SUPPORTED
  if (!strncmp(name, "nccl", 4)) return 5;     // ncclInvalidUsage
  return CUDA_ERROR_NOT_SUPPORTED;
}

static void count(uint32_t* counter) {
  __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
}

int call_stub(int index, void* first_argument) {
  if (!state_init()) return error_code(call_name[index]);
  if (index < MAX_CALLS) count(&self->calls[index]);
  switch (call_class[index]) {
    case CALL_COMPUTES:
      return stream_run(cublas_stream(first_argument),
                        &(Operation){.kind = NODE_KERNEL})
                 ? 13  // CUBLAS_STATUS_EXECUTION_FAILED
                 : 0;
    case CALL_IGNORED:
      return config.strict ? error_code(call_name[index]) : 0;
    default:
      return error_code(call_name[index]);
  }
}

// ---- names asked for at run time

static int late_index(const char* name) {
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
  if (i >= 0) count(&self->late_calls[i]);
  return CUDA_ERROR_NOT_SUPPORTED;
}

int late_stub(int index) {
  if (!state_init()) return CUDA_ERROR_NOT_SUPPORTED;
  count(&self->late_calls[index]);
  return error_code(self->late_call[index]);
}

// Not by dlsym: what overrides it would find its own calls as the driver's.
static void* own_symbol(const char* name) {
  static void* own;
  static void* (*find)(void*, const char*);
  if (!find) find = (void* (*)(void*, const char*))libc_call("dlsym");
  if (!own) own = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  return own ? find(own, name) : NULL;
}

// The newest form of a call that a program built for `version` may use.
void* entry_point(const char* name, int version) {
  const char* symbol = name;
  int newest = 0;
  for (int i = 0; i < call_versions; i++) {
    const CallVersion* v = &call_version[i];
    if (strcmp(v->name, name) || v->version > version || v->version < newest) continue;
    newest = v->version;
    symbol = v->symbol;
  }
  void* found = own_symbol(symbol);
  if (found) return found;
  int i = late_index(symbol);
  return i < 0 ? NULL : (void*)late_stubs[i];
}
