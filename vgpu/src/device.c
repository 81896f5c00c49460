// Devices, contexts, properties, versions, errors.
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "driver.h"
#include "vgpu.h"

int sticky;

static __thread Context* current;
static __thread int ordinal_set;
static __thread cudaError_t last_error;
static Context contexts[MAX_DEVICES];
static pthread_mutex_t context_lock = PTHREAD_MUTEX_INITIALIZER;

void sticky_error(int error) { __atomic_store_n(&sticky, error, __ATOMIC_RELAXED); }

int current_ordinal(void) { return current ? current->ordinal : ordinal_set; }
int current_device(void) { return device_index(current_ordinal()); }

CUresult context_make(int ordinal) {
  pthread_mutex_lock(&context_lock);
  Context* context = &contexts[ordinal];
  CUresult error = CUDA_SUCCESS;
  if (!context->made) {
    int device = device_index(ordinal);
    if (charge(device, (int64_t)config.device[device].context, "context")) {
      context->ordinal = ordinal;
      context->made = true;
    } else {
      error = CUDA_ERROR_OUT_OF_MEMORY;
    }
  }
  pthread_mutex_unlock(&context_lock);
  return error;
}

// What needs no context (which device, which properties) works on after an error
// that ended the context.
static CUresult usable(bool needs_context) {
  if (!state_init())
    return process_ended() ? CUDA_ERROR_DEINITIALIZED : CUDA_ERROR_NO_DEVICE;
  if (forked_after_init()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!visible_devices()) return CUDA_ERROR_NO_DEVICE;
  return needs_context ? __atomic_load_n(&sticky, __ATOMIC_RELAXED) : 0;
}

static CUresult enter(const char* call, uint64_t size, bool needs_context) {
  CUresult error = usable(needs_context);
  if (error) return error;
  if (config.trace) message("%s(%lu)", call, size);
  return injected(call, current_device(), size);
}

CUresult context_usable(void) { return usable(true); }

CUresult context_enter(void) {
  CUresult error = usable(true);
  return error || current ? error : context_make(current_ordinal());
}

cudaError_t rt_leave(cudaError_t error) {
  if (error) last_error = error;
  return error;
}

static CUresult context_use(int ordinal) {
  CUcontext context;
  CUresult error = driver()->cuDevicePrimaryCtxRetain(&context, ordinal);
  if (error) return error;
  ordinal_set = ordinal;
  current = context;
  return CUDA_SUCCESS;
}

// As libcudart, whose first call is cuInit: a slice begins there.
static CUresult initialize(void) {
  static bool initialized;
  if (__atomic_load_n(&initialized, __ATOMIC_RELAXED)) return CUDA_SUCCESS;
  CUresult error = driver()->cuInit(0);
  if (!error) __atomic_store_n(&initialized, true, __ATOMIC_RELAXED);
  return error;
}

cudaError_t rt_enter(const char* call, uint64_t size, bool needs_context) {
  CUresult error = initialize();
  if (!error) error = enter(call, size, needs_context);
  if (!error && needs_context && !current) error = context_use(ordinal_set);
  return rt_leave((cudaError_t)error);
}

CUresult drv_enter(const char* call, uint64_t size, bool needs_context) {
  CUresult error = enter(call, size, needs_context);
  return error || !needs_context || current ? error : context_make(current_ordinal());
}

#define RT_START(name)                              \
  do {                                              \
    cudaError_t entered = rt_enter(name, 0, false); \
    if (entered) return entered;                    \
  } while (0)
#define DRV_START(name)                           \
  do {                                            \
    CUresult entered = drv_enter(name, 0, false); \
    if (entered) return entered;                  \
  } while (0)

static bool is_ordinal(int ordinal) {
  return ordinal >= 0 && ordinal < visible_devices();
}

// ---- devices

EXPORT cudaError_t cudaGetDeviceCount(int* n) {
  *n = 0;
  RT_START(__func__);
  *n = visible_devices();
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDevice(int* ordinal) {
  RT_START(__func__);
  *ordinal = current_ordinal();
  return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int ordinal) {
  RT_START(__func__);
  if (!is_ordinal(ordinal)) RT(cudaErrorInvalidDevice);
  RT(context_use(ordinal));
}

CUresult device_wait(void) {
  if (config.synchronize_us) usleep((unsigned)config.synchronize_us);
  return unsafe_call();
}

EXPORT cudaError_t cudaDeviceSynchronize(void) {
  RT_ENTER(0);
  RT(device_wait());
}

EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = state_init() ? config.driver_version : 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

static int attribute_value(int attribute, int ordinal) {
  const DeviceConfig* d = &config.device[device_index(ordinal)];
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return d->major;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      return d->minor;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      return d->sm_count;
    case CU_DEVICE_ATTRIBUTE_INTEGRATED:
    case CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS:
      return d->integrated;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
      return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z:
      return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
      return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
      return 65535;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      return 32;
    // CUDA programming guide, table of compute capabilities
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
      return d->major == 8 && d->minor ? 1536 : d->major == 12 ? 1536 : 2048;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR:
      return d->major == 8 && d->minor == 6 ? 16 : d->major == 12 ? 24 : 32;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
      return 49152;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      return (int)d->shared_optin;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
      return (int)d->shared_per_sm;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK:
      return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY:
      return 65536;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
      return (int)d->l2_bytes;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
      return d->clock_khz;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
      return d->memory_clock_khz;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
      return d->bus_bits;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT:
      return 512;
    case CU_DEVICE_ATTRIBUTE_MAX_PITCH:
      return 2147483647;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
      return 3;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
      return ordinal + 1;
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED:
      return 1;
    case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH:
      return d->major >= 9;
    default:
      return 0;
  }
}

EXPORT cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute,
                                          int ordinal) {
  RT_START(__func__);
  RT(driver()->cuDeviceGetAttribute(value, (CUdevice_attribute)attribute, ordinal));
}

EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute,
                                     CUdevice ordinal) {
  DRV_START(__func__);
  if (!is_ordinal(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *value = attribute_value((int)attribute, ordinal);
  return CUDA_SUCCESS;
}

// "GPU-" or "MIG-" and 32 hexadecimal digits
static void uuid_bytes(const char* text, char bytes[16]) {
  const char* digits = text + 4;
  for (int i = 0; i < 16; i++) {
    while (*digits == '-') digits++;
    unsigned byte = 0;
    sscanf(digits, "%2x", &byte);
    bytes[i] = (char)byte;
    digits += 2;
  }
}

static int property(CUdevice_attribute attribute, int ordinal, CUresult* error) {
  int value = 0;
  if (!*error) *error = driver()->cuDeviceGetAttribute(&value, attribute, ordinal);
  return value;
}

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* p, int ordinal) {
  RT_START(__func__);
  if (!is_ordinal(ordinal)) RT(cudaErrorInvalidDevice);
  const DeviceConfig* d = &config.device[device_index(ordinal)];
  memset(p, 0, sizeof *p);
  CUresult error = driver()->cuDeviceTotalMem(&p->totalGlobalMem, ordinal);
#define VALUE(name) property(CU_DEVICE_ATTRIBUTE_##name, ordinal, &error)
  snprintf(p->name, sizeof p->name, "%s", d->name);
  uuid_bytes(d->mig_uuid[0] ? d->mig_uuid : d->uuid, p->uuid.bytes);
  p->major = VALUE(COMPUTE_CAPABILITY_MAJOR);
  p->minor = VALUE(COMPUTE_CAPABILITY_MINOR);
  p->multiProcessorCount = VALUE(MULTIPROCESSOR_COUNT);
  p->integrated = VALUE(INTEGRATED);
  p->pageableMemoryAccess = VALUE(PAGEABLE_MEMORY_ACCESS);
  p->warpSize = 32;
  p->maxThreadsPerBlock = VALUE(MAX_THREADS_PER_BLOCK);
  p->maxThreadsPerMultiProcessor = VALUE(MAX_THREADS_PER_MULTIPROCESSOR);
  p->maxBlocksPerMultiProcessor = VALUE(MAX_BLOCKS_PER_MULTIPROCESSOR);
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = VALUE(MAX_GRID_DIM_X);
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->sharedMemPerBlock = VALUE(MAX_SHARED_MEMORY_PER_BLOCK);
  p->sharedMemPerBlockOptin = VALUE(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  p->sharedMemPerMultiprocessor = VALUE(MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
  p->reservedSharedMemPerBlock = 1024;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->totalConstMem = 65536;
  p->memPitch = VALUE(MAX_PITCH);
  p->textureAlignment = 512;
  p->l2CacheSize = VALUE(L2_CACHE_SIZE);
  p->memoryBusWidth = VALUE(GLOBAL_MEMORY_BUS_WIDTH);
  p->asyncEngineCount = 3;
  p->pciBusID = ordinal + 1;
  p->unifiedAddressing = p->canMapHostMemory = p->cooperativeLaunch = 1;
  p->concurrentKernels = p->managedMemory = p->concurrentManagedAccess = 1;
  p->streamPrioritiesSupported = p->memoryPoolsSupported = 1;
  p->hostRegisterSupported = p->canUseHostPointerForRegisteredMem = 1;
  p->clusterLaunch = VALUE(CLUSTER_LAUNCH);
#if CUDART_VERSION < 13000
  p->clockRate = VALUE(CLOCK_RATE);
  p->memoryClockRate = VALUE(MEMORY_CLOCK_RATE);
#endif
#undef VALUE
  RT(error);
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int n, int ordinal) {
  RT_START(__func__);
  if (!is_ordinal(ordinal)) RT(cudaErrorInvalidDevice);
  snprintf(text, n, "%s", config.device[device_index(ordinal)].pci);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetByPCIBusId(int* ordinal, const char* text) {
  RT_START(__func__);
  for (int i = 0; i < visible_devices(); i++) {
    if (strcasecmp(config.device[device_index(i)].pci, text)) continue;
    *ordinal = i;
    return cudaSuccess;
  }
  RT(cudaErrorInvalidDevice);
}

// Devices share nothing, so none can reach another.
EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int ordinal, int peer) {
  RT_START(__func__);
  *can = 0;
  RT(is_ordinal(ordinal) && is_ordinal(peer) ? 0 : cudaErrorInvalidDevice);
}

EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  (void)flags;
  RT_START(__func__);
  RT(is_ordinal(peer) ? cudaErrorPeerAccessUnsupported : cudaErrorInvalidDevice);
}

EXPORT CUresult cuDeviceCanAccessPeer(int* can, CUdevice ordinal, CUdevice peer) {
  (void)ordinal;
  (void)peer;
  *can = 0;
  return CUDA_SUCCESS;
}

static size_t limits[CU_LIMIT_MAX + 8] = {[CU_LIMIT_STACK_SIZE] = 1024,
                                          [CU_LIMIT_PRINTF_FIFO_SIZE] = 1 << 20,
                                          [CU_LIMIT_MALLOC_HEAP_SIZE] = 8 << 20};

EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
  DRV_ENTER(0);
  if (limit >= CU_LIMIT_MAX) return CUDA_ERROR_UNSUPPORTED_LIMIT;
  __atomic_store_n(&limits[limit], value, __ATOMIC_RELAXED);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetLimit(size_t* value, CUlimit limit) {
  DRV_ENTER(0);
  if (limit >= CU_LIMIT_MAX) return CUDA_ERROR_UNSUPPORTED_LIMIT;
  *value = __atomic_load_n(&limits[limit], __ATOMIC_RELAXED);
  return CUDA_SUCCESS;
}

EXPORT cudaError_t cudaDeviceSetLimit(enum cudaLimit limit, size_t value) {
  RT_ENTER(0);
  RT(cuCtxSetLimit((CUlimit)limit, value));
}

EXPORT cudaError_t cudaDeviceGetLimit(size_t* value, enum cudaLimit limit) {
  RT_ENTER(0);
  RT(cuCtxGetLimit(value, (CUlimit)limit));
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  RT_ENTER(0);
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

// ---- errors

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

// ---- driver: devices and contexts

EXPORT CUresult cuInit(unsigned flags) {
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  DRV_START(__func__);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDriverGetVersion(int* version) {
  *version = state_init() ? config.driver_version : CUDA_VERSION;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  DRV_START(__func__);
  if (!is_ordinal(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int* n) {
  *n = 0;
  DRV_START(__func__);
  *n = visible_devices();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char* name, int n, CUdevice ordinal) {
  DRV_START(__func__);
  if (!is_ordinal(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  snprintf(name, n, "%s", config.device[device_index(ordinal)].name);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice ordinal) {
  DRV_START(__func__);
  if (!is_ordinal(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  const DeviceConfig* d = &config.device[device_index(ordinal)];
  uuid_bytes(d->mig_uuid[0] ? d->mig_uuid : d->uuid, uuid->bytes);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem(size_t* bytes, CUdevice ordinal) {
  DRV_START(__func__);
  if (!is_ordinal(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *bytes = config.device[device_index(ordinal)].properties_total;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetPCIBusId(char* text, int n, CUdevice ordinal) {
  DRV_START(__func__);
  if (!is_ordinal(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  snprintf(text, n, "%s", config.device[device_index(ordinal)].pci);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice ordinal) {
  DRV_START(__func__);
  if (!is_ordinal(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  CUresult error = context_make(ordinal);
  if (!error) *context = &contexts[ordinal];
  return error;
}

// The context stays until the process ends, as PyTorch's does.
EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice ordinal) {
  DRV_START(__func__);
  return is_ordinal(ordinal) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice ordinal, unsigned* flags,
                                           int* active) {
  DRV_START(__func__);
  if (!is_ordinal(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *flags = 0;
  *active = contexts[ordinal].made;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  DRV_START(__func__);
  *context = current;
  return CUDA_SUCCESS;
}

static bool is_context(CUcontext context) {
  return context >= contexts && context < contexts + MAX_DEVICES && context->made;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
  DRV_START(__func__);
  if (context && !is_context(context)) return CUDA_ERROR_INVALID_CONTEXT;
  current = context;
  return CUDA_SUCCESS;
}

static __thread Context* pushed[64];
static __thread int pushed_count;

EXPORT CUresult cuCtxPushCurrent(CUcontext context) {
  DRV_START(__func__);
  if (!is_context(context)) return CUDA_ERROR_INVALID_CONTEXT;
  if (pushed_count == 64) return CUDA_ERROR_OUT_OF_MEMORY;
  pushed[pushed_count++] = current;
  current = context;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent(CUcontext* context) {
  DRV_START(__func__);
  if (!pushed_count) return CUDA_ERROR_INVALID_CONTEXT;
  if (context) *context = current;
  current = pushed[--pushed_count];
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
  DRV_START(__func__);
  if (!current) return CUDA_ERROR_INVALID_CONTEXT;
  *device = current->ordinal;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSynchronize(void) {
  DRV_ENTER(0);
  return device_wait();
}

EXPORT CUresult cuCtxGetApiVersion(CUcontext context, unsigned* version) {
  (void)context;
  *version = 3020;
  return CUDA_SUCCESS;
}

// ---- finding calls by name

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

// Gone from CUDA 13's headers, still called by what was built for 12.
EXPORT cudaError_t
cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags,
                        enum cudaDriverEntryPointQueryResult* status) {
  return cudaGetDriverEntryPointByVersion(name, function, CUDART_VERSION, flags,
                                          status);
}
