// What CUDA says of a device: which there are, their memory, properties and limits.
#include <string.h>
#include <strings.h>

#include "state/account.h"
#include "state/context.h"
#include "state/driver.h"

EXPORT cudaError_t cudaGetDeviceCount(int* n) {
  *n = 0;
  RT_START();
  *n = visible_devices();
  return cudaSuccess;
}

EXPORT CUresult cuDeviceGetCount(int* n) {
  *n = 0;
  DRV_START();
  *n = visible_devices();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  DRV_START();
  if (!is_ordinal(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = state_init() ? config.driver_version : 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

EXPORT CUresult cuDriverGetVersion(int* version) {
  *version = state_init() ? config.driver_version : CUDA_VERSION;
  return CUDA_SUCCESS;
}

// ---- memory

static void info(int device, size_t* free_bytes, size_t* total) {
  const DeviceConfig* d = &config.device[device];
  uint64_t bytes = device_free(device);
  if (d->meminfo_total < d->memory) {  // a slice sees its own limit
    uint64_t used = device_used(device);
    bytes = MIN(bytes, used > d->meminfo_total ? 0 : d->meminfo_total - used);
  }
  if (d->meminfo_free_limit) bytes = MIN(bytes, d->meminfo_free_limit);
  if (d->meminfo_free_stale) bytes = d->meminfo_total;
  *free_bytes = bytes;
  *total = d->meminfo_total;
}

EXPORT cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  RT_ENTER(0);
  RT(driver()->cuMemGetInfo(free_bytes, total));
}

EXPORT CUresult cuMemGetInfo(size_t* free_bytes, size_t* total) {
  DRV_ENTER(0);
  info(current_device(), free_bytes, total);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem(size_t* bytes, CUdevice ordinal) {
  DRV_START();
  if (!is_ordinal(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *bytes = config.device[device_index(ordinal)].properties_total;
  return CUDA_SUCCESS;
}

// ---- properties

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
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
      return device_threads(device_index(ordinal));
    // CUDA programming guide, table of compute capabilities
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
    case CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED:
      return 1;
    case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
      return d->multicast_granularity > 0;
    case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH:
      return d->major >= 9;
    default:
      return 0;
  }
}

EXPORT cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute,
                                          int ordinal) {
  RT_START();
  RT(driver()->cuDeviceGetAttribute(value, (CUdevice_attribute)attribute, ordinal));
}

EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute,
                                     CUdevice ordinal) {
  DRV_START();
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
  RT_START();
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

EXPORT CUresult cuDeviceGetName(char* name, int n, CUdevice ordinal) {
  DRV_START();
  if (!is_ordinal(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  snprintf(name, n, "%s", config.device[device_index(ordinal)].name);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice ordinal) {
  DRV_START();
  if (!is_ordinal(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  const DeviceConfig* d = &config.device[device_index(ordinal)];
  uuid_bytes(d->mig_uuid[0] ? d->mig_uuid : d->uuid, uuid->bytes);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetPCIBusId(char* text, int n, CUdevice ordinal) {
  DRV_START();
  if (!is_ordinal(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  snprintf(text, n, "%s", config.device[device_index(ordinal)].pci);
  return CUDA_SUCCESS;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int n, int ordinal) {
  RT_START();
  if (!is_ordinal(ordinal)) RT(cudaErrorInvalidDevice);
  snprintf(text, n, "%s", config.device[device_index(ordinal)].pci);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetByPCIBusId(int* ordinal, const char* text) {
  RT_START();
  for (int i = 0; i < visible_devices(); i++) {
    if (strcasecmp(config.device[device_index(i)].pci, text)) continue;
    *ordinal = i;
    return cudaSuccess;
  }
  RT(cudaErrorInvalidDevice);
}

// ---- peers and limits

// Devices share nothing, so none can reach another.
EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int ordinal, int peer) {
  RT_START();
  *can = 0;
  RT(is_ordinal(ordinal) && is_ordinal(peer) ? 0 : cudaErrorInvalidDevice);
}

EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  (void)flags;
  RT_START();
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
