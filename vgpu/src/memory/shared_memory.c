// Memory that processes share: handles exported as file descriptors, and multicast
// objects, on cards that have multicast. What is imported is charged where it was made.
//
// Contents are not shared: each process sees its own. Only kernels of peers would read
// them.
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "memory/memory.h"
#include "state/calls.h"
#include "state/config.h"
#include "state/context.h"

// What an exported file holds.
typedef struct {
  char kind[8];
  int device;
  bool multicast;
  uint64_t size;
  CUmemAllocationProp properties;
} Exported;

static const char KIND[8] = "vgpu-mem";

// As DRV_USE; on a card without multicast, the call is absent.
static CUresult enter(const char* call) {
  CUresult error = drv_enter(call, 0, NOTHING);
  if (error) return error;
  if (!config.device[current_device()].multicast_granularity)
    return not_implemented(call);
  return context_usable();
}

#define ENTER()                         \
  do {                                  \
    CUresult entered = enter(__func__); \
    if (entered) return entered;        \
  } while (0)

EXPORT CUresult cuMemExportToShareableHandle(void* out,
                                             CUmemGenericAllocationHandle handle,
                                             CUmemAllocationHandleType type,
                                             unsigned long long flags) {
  ENTER();
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    return not_implemented(__func__);
  pthread_mutex_lock(&memory_lock);
  const Physical* p = handle_find(handle);
  Exported e = {0};
  bool right = out && !flags && p && (p->properties.requestedHandleTypes & type);
  if (right) {
    memcpy(e.kind, KIND, sizeof e.kind);
    e.device = p->device;
    e.multicast = p->multicast;
    e.size = p->size;
    e.properties = p->properties;
  }
  pthread_mutex_unlock(&memory_lock);
  if (!right) return CUDA_ERROR_INVALID_VALUE;
  int file = memfd_create("vgpu", MFD_CLOEXEC);
  if (file < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  if (write(file, &e, sizeof e) != sizeof e) {
    close(file);
    return CUDA_ERROR_OPERATING_SYSTEM;
  }
  *(int*)out = file;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle,
                                               void* from,
                                               CUmemAllocationHandleType type) {
  ENTER();
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    return not_implemented(__func__);
  Exported e;
  if (!handle || pread((int)(uintptr_t)from, &e, sizeof e, 0) != sizeof e ||
      memcmp(e.kind, KIND, sizeof e.kind))
    return CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&memory_lock);
  *handle = handle_add(physical_of_others(e.device, e.size), &e.properties);
  handle_find(*handle)->multicast = e.multicast;
  pthread_mutex_unlock(&memory_lock);
  return CUDA_SUCCESS;
}

// ---- multicast: the object takes no memory; memory bound to it does.

EXPORT CUresult cuMulticastGetGranularity(size_t* granularity,
                                          const CUmulticastObjectProp* properties,
                                          CUmulticastGranularity_flags option) {
  ENTER();
  if (!granularity || !properties) return CUDA_ERROR_INVALID_VALUE;
  const DeviceConfig* d = &config.device[current_device()];
  *granularity = option == CU_MULTICAST_GRANULARITY_RECOMMENDED
                     ? d->multicast_granularity
                     : d->vmm_granularity;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMulticastCreate(CUmemGenericAllocationHandle* handle,
                                  const CUmulticastObjectProp* properties) {
  ENTER();
  const DeviceConfig* d = &config.device[current_device()];
  if (!handle || !properties || !properties->size || properties->flags ||
      !properties->numDevices || properties->size % d->vmm_granularity)
    return CUDA_ERROR_INVALID_VALUE;
  CUmemAllocationProp as = {.requestedHandleTypes =
                                (CUmemAllocationHandleType)properties->handleTypes};
  // FlashInfer 0.7.2 makes one of 338 MiB and maps 512 of it, which cards bear.
  uint64_t size = round_up(properties->size, d->multicast_granularity);
  pthread_mutex_lock(&memory_lock);
  *handle = handle_add(physical_of_others(current_device(), size), &as);
  handle_find(*handle)->multicast = true;
  pthread_mutex_unlock(&memory_lock);
  return CUDA_SUCCESS;
}

static bool is_multicast(CUmemGenericAllocationHandle handle, uint64_t offset,
                         uint64_t size) {
  pthread_mutex_lock(&memory_lock);
  const Physical* p = handle_find(handle);
  bool right = p && p->multicast && size <= p->size && offset <= p->size - size;
  pthread_mutex_unlock(&memory_lock);
  return right;
}

EXPORT CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle handle,
                                     CUdevice device) {
  ENTER();
  if (!is_ordinal(device)) return CUDA_ERROR_INVALID_DEVICE;
  return is_multicast(handle, 0, 0) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMulticastBindMem(CUmemGenericAllocationHandle handle, size_t offset,
                                   CUmemGenericAllocationHandle memory,
                                   size_t memory_offset, size_t size,
                                   unsigned long long flags) {
  ENTER();
  pthread_mutex_lock(&memory_lock);
  const Physical* p = handle_find(memory);
  bool right = p && !p->multicast && size && size <= p->size &&
               memory_offset <= p->size - size && !flags;
  pthread_mutex_unlock(&memory_lock);
  return right && is_multicast(handle, offset, size) ? CUDA_SUCCESS
                                                     : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMulticastUnbind(CUmemGenericAllocationHandle handle, CUdevice device,
                                  size_t offset, size_t size) {
  ENTER();
  if (!is_ordinal(device)) return CUDA_ERROR_INVALID_DEVICE;
  return is_multicast(handle, offset, size) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
