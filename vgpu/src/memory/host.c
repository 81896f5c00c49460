// Pinned, registered and managed host memory.
#include <stdlib.h>
#include <sys/mman.h>

#include "memory/memory.h"
#include "state/account.h"
#include "state/context.h"
#include "state/driver.h"

Ranges host_blocks;

// The bytes of the pages that a range touches: what pinning it locks.
static uint64_t pages(const void* address, uint64_t size) {
  uint64_t start = (uint64_t)address / PAGE * PAGE;
  return round_up((uint64_t)address + size, PAGE) - start;
}

static CUresult host_allocate(void** address, uint64_t size, int kind,
                              const char* cause) {
  *address = NULL;
  if (!size) return CUDA_SUCCESS;
  int device = current_device();
  // On unified memory it is device memory. What is registered is the process's own.
  bool charged = config.device[device].integrated;
  uint64_t bytes = round_up(size, PAGE);
  if (charged && !charge(device, (int64_t)bytes, cause))
    return CUDA_ERROR_OUT_OF_MEMORY;
  *address =
      mmap(NULL, bytes, PROT_READ | PROT_WRITE,
           (charged ? MAP_SHARED : MAP_PRIVATE) | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*address == MAP_FAILED) {
    *address = NULL;
    if (charged) charge(device, -(int64_t)bytes, cause);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  HostBlock* block = malloc(sizeof *block);
  if (!block) abort();
  *block = (HostBlock){bytes, device, kind, charged};
  if (kind == PINNED) pin((int64_t)bytes);
  pthread_mutex_lock(&memory_lock);
  ranges_add(&host_blocks, (uint64_t)*address, bytes, block);
  pthread_mutex_unlock(&memory_lock);
  return CUDA_SUCCESS;
}

static CUresult host_release(void* address, bool registered, const char* cause) {
  pthread_mutex_lock(&memory_lock);
  Range* r = ranges_at(&host_blocks, (uint64_t)address);
  HostBlock* block = r ? r->data : NULL;
  bool right = block && r->start == (uint64_t)address &&
               (block->kind == REGISTERED) == registered;
  if (right) ranges_remove(&host_blocks, (uint64_t)address);
  pthread_mutex_unlock(&memory_lock);
  if (!right)
    return registered ? (CUresult)cudaErrorHostMemoryNotRegistered
                      : CUDA_ERROR_INVALID_VALUE;
  if (!registered) munmap(address, block->size);
  if (block->kind != MANAGED) pin(-(int64_t)pages(address, block->size));
  if (block->charged) charge(block->device, -(int64_t)block->size, cause);
  free(block);
  return CUDA_SUCCESS;
}

CUresult host_free(void* address) {
  return host_release(address, false, "cudaHostAlloc");
}

EXPORT cudaError_t cudaHostAlloc(void** address, size_t size, unsigned flags) {
  RT_ENTER(size);
  RT(driver()->cuMemHostAlloc(address, size, flags));
}

EXPORT cudaError_t cudaMallocHost(void** address, size_t size) {
  RT_ENTER(size);
  RT(driver()->cuMemHostAlloc(address, size, 0));
}

EXPORT CUresult cuMemHostAlloc(void** address, size_t size, unsigned flags) {
  (void)flags;
  DRV_ENTER(size);
  return host_allocate(address, size, PINNED, "cudaHostAlloc");
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr* address, size_t size, unsigned flags) {
  (void)flags;
  DRV_ENTER(size);
  return host_allocate((void**)address, size, MANAGED, "cudaMallocManaged");
}

EXPORT cudaError_t cudaMallocManaged(void** address, size_t size, unsigned flags) {
  RT_ENTER(size);
  RT(driver()->cuMemAllocManaged((CUdeviceptr*)address, size, flags));
}

static CUresult host_register(void* address, size_t size) {
  if (!address || !size) return CUDA_ERROR_INVALID_VALUE;
  HostBlock* block = malloc(sizeof *block);
  if (!block) abort();
  *block = (HostBlock){size, current_device(), REGISTERED, false};
  pthread_mutex_lock(&memory_lock);
  bool taken = ranges_overlap(&host_blocks, (uint64_t)address, size);
  if (!taken) ranges_add(&host_blocks, (uint64_t)address, size, block);
  pthread_mutex_unlock(&memory_lock);
  if (taken)
    free(block);
  else
    pin((int64_t)pages(address, size));
  return taken ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED : CUDA_SUCCESS;
}

EXPORT cudaError_t cudaHostRegister(void* address, size_t size, unsigned flags) {
  RT_ENTER(size);
  RT(driver()->cuMemHostRegister(address, size, flags));
}

EXPORT cudaError_t cudaHostUnregister(void* address) {
  RT_ENTER(0);
  RT(driver()->cuMemHostUnregister(address));
}

EXPORT CUresult cuMemHostRegister(void* address, size_t size, unsigned flags) {
  (void)flags;
  DRV_ENTER(size);
  return host_register(address, size);
}

EXPORT CUresult cuMemHostUnregister(void* address) {
  DRV_ENTER(0);
  return host_release(address, true, "cudaHostRegister");
}

EXPORT cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned flags) {
  (void)flags;
  RT_ENTER(0);
  pthread_mutex_lock(&memory_lock);
  bool known = ranges_at(&host_blocks, (uint64_t)host);
  pthread_mutex_unlock(&memory_lock);
  *device = known ? host : NULL;
  RT(known ? 0 : CUDA_ERROR_INVALID_VALUE);
}

EXPORT cudaError_t cudaHostGetFlags(unsigned* flags, void* host) {
  RT_ENTER(0);
  pthread_mutex_lock(&memory_lock);
  bool known = ranges_at(&host_blocks, (uint64_t)host);
  pthread_mutex_unlock(&memory_lock);
  *flags = cudaHostAllocPortable | cudaHostAllocMapped;
  RT(known ? 0 : CUDA_ERROR_INVALID_VALUE);
}
