// Calls by their names, for a program that asks for one at run time.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <string.h>

#include "sources/stubs.h"
#include "state/calls.h"
#include "state/driver.h"

// Not by dlsym: what overrides it would find its own calls as the driver's.
static void* own_symbol(const char* name) {
  static void* own;
  static void* (*find)(void*, const char*);
  if (!find) find = (void* (*)(void*, const char*))libc_call("dlsym");
  if (!own) own = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  return own ? find(own, name) : NULL;
}

// The newest form of a call that a program built for `version` may use.
static void* entry_point(const char* name, int version) {
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

EXPORT CUresult cuGetProcAddress(const char* name, void** function, int version,
                                 cuuint64_t flags,
                                 CUdriverProcAddressQueryResult* status) {
  (void)flags;
  *function = entry_point(name, version);
  if (status)
    *status =
        *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult* status) {
  CUresult error =
      driver()->cuGetProcAddress(name, function, (int)version, flags, NULL);
  if (error) *function = NULL;
  if (status)
    *status = error ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// Gone from CUDA 13's headers, still called by libraries built for 12.
EXPORT cudaError_t
cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags,
                        enum cudaDriverEntryPointQueryResult* status) {
  return cudaGetDriverEntryPointByVersion(name, function, CUDART_VERSION, flags,
                                          status);
}
