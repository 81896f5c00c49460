// The driver's calls that the runtime makes, with the versions that libcudart names.
#pragma once

#include <cuda.h>

#define DRIVER_CALLS                     \
  CALL(cuGetProcAddress, 12000)          \
  CALL(cuInit, 2000)                     \
  CALL(cuDevicePrimaryCtxRetain, 7000)   \
  CALL(cuDeviceGetAttribute, 2000)       \
  CALL(cuDeviceTotalMem, 3020)           \
  CALL(cuDeviceGetDefaultMemPool, 11020) \
  CALL(cuDeviceGetMemPool, 11020)        \
  CALL(cuMemGetInfo, 3020)               \
  CALL(cuMemAlloc, 3020)                 \
  CALL(cuMemFree, 3020)                  \
  CALL(cuMemAllocManaged, 6000)          \
  CALL(cuMemHostAlloc, 2020)             \
  CALL(cuMemFreeHost, 2000)              \
  CALL(cuMemHostRegister, 6050)          \
  CALL(cuMemHostUnregister, 4000)        \
  CALL(cuMemAllocAsync, 11020)           \
  CALL(cuMemAllocFromPoolAsync, 11020)   \
  CALL(cuMemFreeAsync, 11020)            \
  CALL(cuMemPoolTrimTo, 11020)           \
  CALL(cuMemPoolSetAttribute, 11020)     \
  CALL(cuMemPoolGetAttribute, 11020)     \
  CALL(cuMemPoolSetAccess, 11020)

typedef struct {
#define CALL(name, version) typeof(&name) name;
  DRIVER_CALLS
#undef CALL
} Driver;

const Driver* driver(void);
