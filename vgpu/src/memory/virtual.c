// Virtual memory: reserve, create, map, allow access, unmap, release.
#include <stdlib.h>

#include "memory/memory.h"
#include "state/calls.h"
#include "state/config.h"
#include "state/context.h"

// The handles a program holds. Numbers are never used again, so a stale handle
// is an error and not another allocation.
static Ranges handles;
static uint64_t next_handle = 0x7600000000000001;

Physical* handle_find(CUmemGenericAllocationHandle handle) {
  Range* r = ranges_at(&handles, handle);
  return r ? r->data : NULL;
}

uint64_t handle_add(Physical* p, const CUmemAllocationProp* properties) {
  p->properties = *properties;
  p->handle = next_handle++;
  p->held = 1;
  ranges_add(&handles, p->handle, 1, p);
  return p->handle;
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t* granularity,
                                              const CUmemAllocationProp* properties,
                                              CUmemAllocationGranularity_flags option) {
  (void)option;
  DRV_USE(0);
  if (!properties || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED)
    return CUDA_ERROR_INVALID_VALUE;
  *granularity = config.device[current_device()].vmm_granularity;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr* address, size_t size, size_t alignment,
                                    CUdeviceptr hint, unsigned long long flags) {
  (void)hint;
  DRV_USE(size);
  uint64_t granularity = config.device[current_device()].vmm_granularity;
  if (!size || size % granularity || (alignment & (alignment - 1)) || flags)
    return CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&memory_lock);
  uint64_t start = address_take(size, alignment);
  if (start) ranges_add(&reserved, start, size, NULL);
  pthread_mutex_unlock(&memory_lock);
  if (!start) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = start;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  DRV_USE(0);
  pthread_mutex_lock(&memory_lock);
  Range* r = ranges_at(&reserved, address);
  bool right = r && r->start == address && r->size == size &&
               !ranges_overlap(&mappings, address, size);
  if (right) {
    ranges_remove(&reserved, address);
    address_give(address, size);
  }
  pthread_mutex_unlock(&memory_lock);
  return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static bool location_device(const CUmemLocation* location, int* device) {
  if (location->type != CU_MEM_LOCATION_TYPE_DEVICE) return false;
  if (location->id < 0 || location->id >= visible_devices()) return false;
  *device = device_index(location->id);
  return true;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size,
                            const CUmemAllocationProp* properties,
                            unsigned long long flags) {
  DRV_USE(size);
  int device;
  if (!size || flags || !properties ||
      properties->type != CU_MEM_ALLOCATION_TYPE_PINNED)
    return CUDA_ERROR_INVALID_VALUE;
  if (!location_device(&properties->location, &device))
    return properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE
               ? CUDA_ERROR_INVALID_DEVICE
               : not_implemented("cuMemCreate(host memory)");
  if (size % config.device[device].vmm_granularity) return CUDA_ERROR_INVALID_VALUE;
  // A handle type is a wish to export: see shared_memory.c.
  pthread_mutex_lock(&memory_lock);
  Physical* p = physical_take(device, size, "cuMemCreate");
  if (p) *handle = handle_add(p, properties);
  pthread_mutex_unlock(&memory_lock);
  return p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

// Physical memory lives until it is released and unmapped everywhere: the
// program's handle counts as one reference, and so does each mapping.
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  DRV_USE(0);
  pthread_mutex_lock(&memory_lock);
  Physical* p = handle_find(handle);
  if (p && --p->held == 0) {
    ranges_remove(&handles, handle);
    physical_give(p);
  }
  pthread_mutex_unlock(&memory_lock);
  return p ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle,
                                            void* address) {
  DRV_USE(0);
  pthread_mutex_lock(&memory_lock);
  Range* r = ranges_at(&mappings, (uint64_t)address);
  Mapping* m = r ? r->data : NULL;
  Physical* p = m && m->by == BY_MAP ? m->physical : NULL;
  if (p) {
    if (p->held++ == 0) {
      p->references++;
      ranges_add(&handles, p->handle, 1, p);
    }
    *handle = p->handle;
  }
  pthread_mutex_unlock(&memory_lock);
  return p ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(
    CUmemAllocationProp* properties, CUmemGenericAllocationHandle handle) {
  DRV_USE(0);
  pthread_mutex_lock(&memory_lock);
  Physical* p = handle_find(handle);
  if (p) *properties = p->properties;
  pthread_mutex_unlock(&memory_lock);
  return p ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static bool within_reservation(uint64_t address, uint64_t size) {
  Range* r = ranges_at(&reserved, address);
  return r && size <= r->size - (address - r->start);
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset,
                         CUmemGenericAllocationHandle handle,
                         unsigned long long flags) {
  DRV_USE(size);
  pthread_mutex_lock(&memory_lock);
  Physical* p = handle_find(handle);
  CUresult error = CUDA_ERROR_INVALID_VALUE;
  if (p && size && !flags) {
    const DeviceConfig* d = &config.device[p->device];
    uint64_t granularity = d->vmm_granularity;
    // cuda.h: the offset into a handle "currently must be zero".
    bool offset_allowed = !offset || (d->vmm_handle_offset && !config.strict);
    if (offset_allowed && (address | size | offset) % granularity == 0 &&
        offset < p->size && size <= p->size - offset &&
        within_reservation(address, size) &&
        !ranges_overlap(&mappings, address, size)) {
      Mapping* m = calloc(1, sizeof *m);
      if (!m) abort();
      *m = (Mapping){.physical = p, .offset = offset, .by = BY_MAP};
      p->references++;
      ranges_add(&mappings, address, size, m);
      error = CUDA_SUCCESS;
    }
  }
  pthread_mutex_unlock(&memory_lock);
  return error;
}

// Whether whole mappings made by cuMemMap cover the range exactly.
static bool covered(uint64_t address, uint64_t size, bool exactly) {
  for (uint64_t at = address, end = address + size; at < end;) {
    Range* r = ranges_at(&mappings, at);
    if (!r || ((Mapping*)r->data)->by != BY_MAP) return false;
    if (exactly && (r->start != at || r->size > end - at)) return false;
    at = r->start + r->size;
  }
  return true;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  DRV_USE(0);
  pthread_mutex_lock(&memory_lock);
  bool right = size && covered(address, size, true);
  for (uint64_t at = address; right && at < address + size;) {
    uint64_t next = at + ranges_at(&mappings, at)->size;
    Mapping* m = ranges_remove(&mappings, at);
    physical_give(m->physical);
    free(m);
    at = next;
  }
  pthread_mutex_unlock(&memory_lock);
  return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// Access is kept for the mapping's own device; what peers may do is absent. Memory of
// others and multicast objects are no device's own.
EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t size,
                               const CUmemAccessDesc* access, size_t n) {
  DRV_USE(0);
  if (!size || !access || !n) return CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&memory_lock);
  bool right = covered(address, size, true);
  for (uint64_t at = address; right && at < address + size;) {
    Range* r = ranges_at(&mappings, at);
    Mapping* m = r->data;
    for (size_t i = 0; i < n; i++) {
      int device;
      if (!location_device(&access[i].location, &device)) continue;
      if (device != m->physical->device && m->physical->cause) continue;
      m->readable = access[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE;
      m->writable = access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    }
    at = r->start + r->size;
  }
  pthread_mutex_unlock(&memory_lock);
  return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location,
                               CUdeviceptr address) {
  DRV_USE(0);
  int device;
  pthread_mutex_lock(&memory_lock);
  Range* r = ranges_at(&mappings, address);
  Mapping* m = r ? r->data : NULL;
  bool right = m && location_device(location, &device);
  if (right)
    *flags = device != m->physical->device ? CU_MEM_ACCESS_FLAGS_PROT_NONE
             : m->writable                 ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
             : m->readable                 ? CU_MEM_ACCESS_FLAGS_PROT_READ
                                           : CU_MEM_ACCESS_FLAGS_PROT_NONE;
  pthread_mutex_unlock(&memory_lock);
  return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
