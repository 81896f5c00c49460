// Modules, kernels and their launches. A kernel does nothing, unless the program gives
// it a computation; a hook, when the configuration has one for its name, writes a value
// through an argument.
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "state/account.h"
#include "state/context.h"
#include "state/objects.h"
#include "streams/stream.h"

typedef struct CUmod_st {
  int device;
  int64_t charged;
  uint64_t stack;  // bytes a thread of its largest kernel
  int kernels;     // -1: not known
  char** names;    // of the kernels
} Module;

typedef struct CUfunc_st {
  Module* module;
  uint16_t launched;  // a bit for each device that it was launched on
  char name[];
} Kernel;

// ---- kernels compiled into the program, known by the address of a host function

static struct {
  const void* function;
  const char* name;
  const void* image;
  uint16_t launched;
}* registered;
static size_t registered_count, registered_room;
static bool registered_sorted;
static pthread_mutex_t registered_lock = PTHREAD_MUTEX_INITIALIZER;

static int compare(const void* a, const void* b) {
  uintptr_t x = *(const uintptr_t*)a, y = *(const uintptr_t*)b;
  return x < y ? -1 : x > y;
}

// With registered_lock held. NULL: unknown.
static __typeof__(registered) registered_kernel(const void* function) {
  if (!registered_sorted)
    qsort(registered, registered_count, sizeof *registered, compare);
  registered_sorted = true;
  return bsearch(&function, registered, registered_count, sizeof *registered, compare);
}

static const char* registered_name(const void* function) {
  pthread_mutex_lock(&registered_lock);
  __typeof__(registered) found = registered_kernel(function);
  const char* name = found ? found->name : NULL;
  pthread_mutex_unlock(&registered_lock);
  return name;
}

const void* kernel_image(const void* function) {
  pthread_mutex_lock(&registered_lock);
  __typeof__(registered) found = registered_kernel(function);
  const void* image = found ? found->image : NULL;
  pthread_mutex_unlock(&registered_lock);
  return image;
}

// The handle is the image itself: callers only give it back.
EXPORT void** __cudaRegisterFatBinary(void* image) { return image; }

EXPORT void __cudaRegisterFatBinaryEnd(void** handle) { (void)handle; }
EXPORT void __cudaUnregisterFatBinary(void** handle) { (void)handle; }

EXPORT char __cudaInitModule(void** handle) {
  (void)handle;
  return 0;
}

EXPORT void __cudaRegisterFunction(void** handle, const char* function,
                                   char* device_function, const char* name,
                                   int thread_limit, void* tid, void* bid, void* block,
                                   void* grid, int* warp) {
  (void)device_function, (void)thread_limit, (void)tid, (void)bid;
  (void)block, (void)grid, (void)warp;
  pthread_mutex_lock(&registered_lock);
  if (registered_count == registered_room) {
    registered_room = registered_room ? registered_room * 2 : 4096;
    registered = realloc(registered, registered_room * sizeof *registered);
    if (!registered) abort();
  }
  registered[registered_count].function = function;
  registered[registered_count].image = handle;
  registered[registered_count].launched = 0;
  registered[registered_count++].name = name;
  registered_sorted = false;
  pthread_mutex_unlock(&registered_lock);
}

EXPORT void __cudaRegisterVar(void** handle, char* variable, char* device_variable,
                              const char* name, int external, size_t size, int constant,
                              int global) {
  (void)handle, (void)variable, (void)device_variable, (void)name, (void)external;
  (void)size, (void)constant, (void)global;
}

static __thread struct {
  dim3 grid, block;
  size_t shared_bytes;
  void* stream;
} launch;

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                            void* stream) {
  launch.grid = grid;
  launch.block = block;
  launch.shared_bytes = shared_bytes;
  launch.stream = stream;
  return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block,
                                              size_t* shared_bytes, void* stream) {
  *grid = launch.grid;
  *block = launch.block;
  *shared_bytes = launch.shared_bytes;
  *(void**)stream = launch.stream;
  return cudaSuccess;
}

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}

// ---- launches

static const char* kernel_name(const void* kernel) {
  return object_is(kernel, KERNEL) ? ((const Kernel*)kernel)->name
                                   : registered_name(kernel);
}

static CUresult run_hook(const Hook* hook, void** arguments, uint64_t blocks,
                         void* stream) {
  uint64_t n = hook->bytes / hook->value_bytes, value = hook->value;
  if (hook->value_argument >= 0)
    memcpy(&value, arguments[hook->value_argument], hook->value_bytes);
  if (hook->count_argument >= 0) n *= *(const uint32_t*)arguments[hook->count_argument];
  if (hook->per_block) n *= blocks;
  return stream_run(stream, &(Operation){.kind = NODE_FILL,
                                         .to = *(uint64_t*)arguments[hook->argument],
                                         .size = n,
                                         .value = value,
                                         .value_bytes = hook->value_bytes});
}

// CUDA loads a kernel's code when it is first launched.
static CUresult kernel_load(const void* kernel) {
  Module* module = object_is(kernel, KERNEL) ? ((const Kernel*)kernel)->module : NULL;
  int device = module ? module->device : current_device();
  if (module && !charge_stack(device, module->stack)) return CUDA_ERROR_OUT_OF_MEMORY;
  int64_t bytes = (int64_t)config.device[device].kernel;
  if (!bytes) return CUDA_SUCCESS;
  pthread_mutex_lock(&registered_lock);
  __typeof__(registered) known = module ? NULL : registered_kernel(kernel);
  uint16_t none = UINT16_MAX;
  uint16_t* launched = module  ? &((Kernel*)kernel)->launched
                       : known ? &known->launched
                               : &none;
  bool first = !(*launched >> device & 1);
  bool fits = !first || charge(device, bytes, "kernel");
  if (first && fits) *launched |= (uint16_t)(1u << device);
  if (first && fits && module) module->charged += bytes;
  pthread_mutex_unlock(&registered_lock);
  return fits ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

// What the next launch computes.
static __thread struct {
  CUresult (*call)(void*);
  void* argument;
} next;

// Whether a launch took the last one.
EXPORT int vgpu_compute(CUresult (*call)(void*), void* argument) {
  bool taken = !next.call;
  next.call = call;
  next.argument = argument;
  return taken;
}

static CUresult kernel_launch(const void* kernel, void** arguments, uint64_t blocks,
                              void* stream) {
  CUresult error = kernel_load(kernel);
  if (error) return error;
  const Operation run = {
      .kind = NODE_KERNEL, .call = next.call, .argument = next.argument};
  next.call = NULL;
  error = stream_run(stream, &run);
  if (!config.hooks || !arguments) return error;
  const char* name = kernel_name(kernel);
  for (int i = 0; name && i < config.hooks && !error; i++)
    if (!fnmatch(config.hook[i].kernel, name, 0))
      error = run_hook(&config.hook[i], arguments, blocks, stream);
  return error;
}

EXPORT cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block,
                                    void** arguments, size_t shared_bytes,
                                    cudaStream_t stream) {
  (void)block, (void)shared_bytes;
  RT_ENTER(0);
  RT(kernel_launch(kernel, arguments, (uint64_t)grid.x * grid.y * grid.z, stream));
}

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block,
                                      void** arguments, size_t shared_bytes,
                                      cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream);
}

EXPORT cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3 grid,
                                               dim3 block, void** arguments,
                                               size_t shared_bytes,
                                               cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream);
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how,
                                       const void* kernel, void** arguments) {
  RT_ENTER(0);
  const dim3 grid = how->gridDim;
  RT(kernel_launch(kernel, arguments, (uint64_t)grid.x * grid.y * grid.z, how->stream));
}

EXPORT CUresult cuLaunchKernel(CUfunction kernel, unsigned gx, unsigned gy, unsigned gz,
                               unsigned bx, unsigned by, unsigned bz,
                               unsigned shared_bytes, CUstream stream, void** arguments,
                               void** extra) {
  (void)bx, (void)by, (void)bz, (void)shared_bytes;
  (void)extra;
  DRV_ENTER(0);
  return kernel_launch(kernel, arguments, (uint64_t)gx * gy * gz, stream);
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* how, CUfunction kernel,
                                 void** arguments, void** extra) {
  (void)extra;
  DRV_ENTER(0);
  const uint64_t blocks = (uint64_t)how->gridDimX * how->gridDimY * how->gridDimZ;
  return kernel_launch(kernel, arguments, blocks, how->hStream);
}

EXPORT CUresult cuLaunchCooperativeKernel(CUfunction kernel, unsigned gx, unsigned gy,
                                          unsigned gz, unsigned bx, unsigned by,
                                          unsigned bz, unsigned shared_bytes,
                                          CUstream stream, void** arguments) {
  (void)bx, (void)by, (void)bz, (void)shared_bytes;
  DRV_ENTER(0);
  return kernel_launch(kernel, arguments, (uint64_t)gx * gy * gz, stream);
}

// ---- modules and libraries loaded at run time

static CUresult module_load(void** handle, const void* image) {
  int device = current_device();
  int64_t bytes = (int64_t)config.device[device].module;
  if (!charge(device, bytes, "module")) return CUDA_ERROR_OUT_OF_MEMORY;
  Module* module = object_new(MODULE, sizeof *module);
  *module = (Module){.device = device, .charged = bytes, .stack = image_stack(image)};
  module->kernels = image_kernels(image, &module->names);
  *handle = module;
  return CUDA_SUCCESS;
}

static CUresult module_unload(void* handle) {
  Module* module = handle;
  if (!object_is(module, MODULE)) return CUDA_ERROR_INVALID_HANDLE;
  charge(module->device, -module->charged, "module");
  for (int i = 0; i < module->kernels; i++) free(module->names[i]);
  free(module->names);
  object_delete(module, MODULE);
  return CUDA_SUCCESS;
}

static CUresult module_load_file(void** handle, const char* path) {
  FILE* file = path ? fopen(path, "rb") : NULL;
  if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
  fseek(file, 0, SEEK_END);
  const long size = ftell(file);
  rewind(file);
  char* image = calloc(1, (size_t)size + 64);  // no shorter than a head
  const bool whole = fread(image, 1, (size_t)size, file) == (size_t)size;
  fclose(file);
  const CUresult error =
      whole ? module_load(handle, image) : CUDA_ERROR_OPERATING_SYSTEM;
  free(image);
  return error;
}

// Any name is found: the contents of an image are not searched for it.
static CUresult module_kernel(void** kernel, void* module, const char* name) {
  if (!object_is(module, MODULE)) return CUDA_ERROR_INVALID_HANDLE;
  Kernel* k = object_new(KERNEL, sizeof *k + strlen(name) + 1);
  *k = (Kernel){.module = module};
  memcpy(k->name, name, strlen(name) + 1);
  *kernel = k;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  DRV_ENTER(0);
  return image ? module_load((void**)module, image) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned n,
                                   CUjit_option* options, void** values) {
  (void)n, (void)options, (void)values;
  DRV_ENTER(0);
  return image ? module_load((void**)module, image) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuModuleLoadFatBinary(CUmodule* module, const void* image) {
  DRV_ENTER(0);
  return image ? module_load((void**)module, image) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuModuleLoad(CUmodule* module, const char* path) {
  DRV_ENTER(0);
  return module_load_file((void**)module, path);
}

EXPORT CUresult cuModuleUnload(CUmodule module) {
  DRV_ENTER(0);
  return module_unload(module);
}

EXPORT CUresult cuModuleGetFunction(CUfunction* kernel, CUmodule module,
                                    const char* name) {
  DRV_ENTER(0);
  return module_kernel((void**)kernel, module, name);
}

EXPORT CUresult cuLibraryLoadData(CUlibrary* library, const void* image,
                                  CUjit_option* jit, void** jit_values, unsigned jit_n,
                                  CUlibraryOption* options, void** values, unsigned n) {
  (void)jit, (void)jit_values, (void)jit_n, (void)options, (void)values, (void)n;
  DRV_USE(0);
  return image ? module_load((void**)library, image) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuLibraryLoadFromFile(CUlibrary* library, const char* path,
                                      CUjit_option* jit, void** jit_values,
                                      unsigned jit_n, CUlibraryOption* options,
                                      void** values, unsigned n) {
  (void)jit, (void)jit_values, (void)jit_n, (void)options, (void)values, (void)n;
  DRV_USE(0);
  return module_load_file((void**)library, path);
}

EXPORT CUresult cuLibraryUnload(CUlibrary library) {
  DRV_USE(0);
  return module_unload(library);
}

EXPORT CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library,
                                   const char* name) {
  DRV_USE(0);
  return module_kernel((void**)kernel, library, name);
}

EXPORT CUresult cuLibraryGetKernelCount(unsigned* count, CUlibrary library) {
  DRV_USE(0);
  const Module* module = (const Module*)library;
  if (!object_is(module, MODULE)) return CUDA_ERROR_INVALID_HANDLE;
  if (module->kernels < 0) return CUDA_ERROR_NOT_SUPPORTED;
  *count = (unsigned)module->kernels;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuLibraryEnumerateKernels(CUkernel* kernels, unsigned n,
                                          CUlibrary library) {
  DRV_USE(0);
  const Module* module = (const Module*)library;
  if (!object_is(module, MODULE)) return CUDA_ERROR_INVALID_HANDLE;
  if (module->kernels < 0) return CUDA_ERROR_NOT_SUPPORTED;
  for (unsigned i = 0; i < n && i < (unsigned)module->kernels; i++)
    module_kernel((void**)&kernels[i], library, module->names[i]);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  DRV_USE(0);
  *function = (CUfunction)kernel;
  return object_is(kernel, KERNEL) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

EXPORT CUresult cuLibraryGetModule(CUmodule* module, CUlibrary library) {
  DRV_USE(0);
  *module = (CUmodule)library;
  return object_is(library, MODULE) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

EXPORT CUresult cuFuncGetName(const char** name, CUfunction kernel) {
  DRV_USE(0);
  *name = kernel_name(kernel);
  return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

EXPORT CUresult cuKernelGetName(const char** name, CUkernel kernel) {
  return cuFuncGetName(name, (CUfunction)kernel);
}

EXPORT CUresult cuFuncGetModule(CUmodule* module, CUfunction kernel) {
  DRV_USE(0);
  if (!object_is(kernel, KERNEL)) return CUDA_ERROR_INVALID_HANDLE;
  *module = kernel->module;
  return CUDA_SUCCESS;
}

EXPORT cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void* image,
                                       enum cudaJitOption* jit, void** jit_values,
                                       unsigned jit_n, enum cudaLibraryOption* options,
                                       void** values, unsigned n) {
  (void)jit, (void)jit_values, (void)jit_n, (void)options, (void)values, (void)n;
  RT_ENTER(0);
  RT(image ? module_load((void**)library, image) : CUDA_ERROR_INVALID_VALUE);
}

EXPORT cudaError_t cudaLibraryUnload(cudaLibrary_t library) {
  RT_ENTER(0);
  RT(module_unload(library));
}

EXPORT cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t library,
                                        const char* name) {
  RT_ENTER(0);
  RT(module_kernel((void**)kernel, library, name));
}
