// What a kernel looks like: plausible, since no code is read.
#include <string.h>

#include "sources/sources.h"
#include "state/config.h"
#include "state/context.h"
#include "streams/stream.h"

static int function_attribute(CUfunction_attribute attribute) {
  const DeviceConfig* d = &config.device[current_device()];
  switch ((int)attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      return 1024;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
      return 32;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
      return d->major * 10 + d->minor;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      return 49152;
    default:
      return 0;
  }
}

EXPORT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute,
                                   CUfunction kernel) {
  (void)kernel;
  DRV_ENTER(0);
  *value = function_attribute(attribute);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuKernelGetAttribute(int* value, CUfunction_attribute attribute,
                                     CUkernel kernel, CUdevice device) {
  (void)device;
  return cuFuncGetAttribute(value, attribute, (CUfunction)kernel);
}

EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* a,
                                         const void* function) {
  RT_ENTER(0);
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->ptxVersion = a->binaryVersion = image_architecture(
      kernel_image(function), function_attribute(CU_FUNC_ATTRIBUTE_BINARY_VERSION));
  a->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}

// Attributes steer how a kernel runs; nothing runs, so there is nothing to keep.
EXPORT CUresult cuFuncSetAttribute(CUfunction kernel, CUfunction_attribute attribute,
                                   int value) {
  (void)kernel, (void)attribute, (void)value;
  DRV_ENTER(0);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value,
                                     CUkernel kernel, CUdevice device) {
  (void)kernel, (void)attribute, (void)value, (void)device;
  DRV_ENTER(0);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetCacheConfig(CUfunction kernel, CUfunc_cache cache) {
  (void)kernel, (void)cache;
  DRV_ENTER(0);
  return CUDA_SUCCESS;
}

EXPORT cudaError_t cudaFuncSetAttribute(const void* function,
                                        enum cudaFuncAttribute attribute, int value) {
  (void)function, (void)attribute, (void)value;
  RT_ENTER(0);
  return cudaSuccess;
}

EXPORT cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel,
                                                   enum cudaFuncAttribute attribute,
                                                   int value, int device) {
  (void)kernel, (void)attribute, (void)value, (void)device;
  RT_ENTER(0);
  return cudaSuccess;
}

static int resident_blocks(int block) {
  int threads, blocks;
  cuDeviceGetAttribute(&threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR,
                       current_ordinal());
  cuDeviceGetAttribute(&blocks, CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR,
                       current_ordinal());
  return MAX(1, MIN(blocks, threads / MAX(1, block)));
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n,
                                                                 const void* function,
                                                                 int block,
                                                                 size_t shared_bytes) {
  (void)function, (void)shared_bytes;
  RT_ENTER(0);
  *n = resident_blocks(block);
  return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* n, const void* function, int block, size_t shared_bytes, unsigned flags) {
  (void)flags;
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(n, function, block,
                                                       shared_bytes);
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction kernel,
                                                            int block,
                                                            size_t shared_bytes) {
  (void)kernel, (void)shared_bytes;
  DRV_ENTER(0);
  *n = resident_blocks(block);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxActiveClusters(int* n, CUfunction kernel,
                                             const CUlaunchConfig* how) {
  (void)kernel, (void)how;
  DRV_ENTER(0);
  *n = config.device[current_device()].sm_count / 2;
  return CUDA_SUCCESS;
}

// A descriptor in host memory that only a kernel would read.
EXPORT CUresult cuTensorMapEncodeTiled(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
    const cuuint64_t* dimensions, const cuuint64_t* strides, const cuuint32_t* box,
    const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
    CUtensorMapFloatOOBfill fill) {
  (void)type, (void)rank, (void)address, (void)dimensions, (void)strides, (void)box;
  (void)element_strides, (void)interleave, (void)swizzle, (void)promotion, (void)fill;
  DRV_ENTER(0);
  memset(map, 0, sizeof *map);
  return CUDA_SUCCESS;
}
