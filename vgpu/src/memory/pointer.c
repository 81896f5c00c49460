// What a pointer is.
#include <string.h>

#include "memory/graph_memory.h"
#include "state/calls.h"
#include "state/config.h"
#include "state/context.h"

typedef struct {
  CUmemorytype type;  // 0: unknown to CUDA
  int device;
  uint64_t start, size;
  bool managed, by_malloc;
} Pointer;

static Pointer pointer_look_up(uint64_t address) {
  Pointer found = {0};
  pthread_mutex_lock(&memory_lock);
  Range* r = ranges_at(&mappings, address);
  if (r) {
    Mapping* m = r->data;
    found = (Pointer){CU_MEMORYTYPE_DEVICE,
                      m->physical->device,
                      r->start,
                      m->requested ? m->requested : r->size,
                      false,
                      m->by == BY_MALLOC};
  } else if ((r = ranges_at(&host_blocks, address))) {
    HostBlock* block = r->data;
    found =
        (Pointer){block->kind == MANAGED ? CU_MEMORYTYPE_UNIFIED : CU_MEMORYTYPE_HOST,
                  block->device,
                  r->start,
                  r->size,
                  block->kind == MANAGED,
                  false};
  }
  const GraphAllocation* a = found.type ? NULL : graph_allocation_at(address);
  if (a)
    found = (Pointer){CU_MEMORYTYPE_DEVICE, a->device, a->address,
                      a->requested,         false,     false};
  pthread_mutex_unlock(&memory_lock);
  return found;
}

static int ordinal_of(int device) {
  for (int i = 0; i < visible_devices(); i++)
    if (device_index(i) == device) return i;
  return 0;
}

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* a,
                                            const void* pointer) {
  RT_ENTER(0);
  Pointer p = pointer_look_up((uint64_t)pointer);
  memset(a, 0, sizeof *a);
  a->type = p.managed                        ? cudaMemoryTypeManaged
            : p.type == CU_MEMORYTYPE_DEVICE ? cudaMemoryTypeDevice
            : p.type == CU_MEMORYTYPE_HOST   ? cudaMemoryTypeHost
                                             : cudaMemoryTypeUnregistered;
  a->device = p.type ? ordinal_of(p.device) : -2;
  if (p.type) a->devicePointer = (void*)pointer;
  if (p.type != CU_MEMORYTYPE_DEVICE) a->hostPointer = p.type ? (void*)pointer : 0;
  return cudaSuccess;
}

static CUresult pointer_attribute(void* data, CUpointer_attribute attribute,
                                  const Pointer* p, CUdeviceptr address) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *(CUcontext*)data = context_of(ordinal_of(p->device));
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *(unsigned*)data = p->type;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      *(CUdeviceptr*)data = address;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      *(void**)data = p->type == CU_MEMORYTYPE_DEVICE ? NULL : (void*)address;
      return p->type == CU_MEMORYTYPE_DEVICE ? CUDA_ERROR_INVALID_VALUE : 0;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *(int*)data = ordinal_of(p->device);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      *(bool*)data = p->managed;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      *(CUdeviceptr*)data = p->start;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      *(size_t*)data = p->size;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPED:
      *(bool*)data = true;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      *(unsigned long long*)data = p->start;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      *(bool*)data = p->by_malloc;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
      *(int*)data = 0;
      return CUDA_SUCCESS;
    default:
      return not_implemented("cuPointerGetAttribute(other)");
  }
}

EXPORT CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute,
                                      CUdeviceptr address) {
  DRV_USE(0);
  Pointer p = pointer_look_up(address);
  return p.type ? pointer_attribute(data, attribute, &p, address)
                : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute* attributes,
                                       void** data, CUdeviceptr address) {
  DRV_USE(0);
  Pointer p = pointer_look_up(address);
  for (unsigned i = 0; i < n; i++) {
    if (p.type) {
      pointer_attribute(data[i], attributes[i], &p, address);
    } else if (attributes[i] == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) {
      *(unsigned*)data[i] = 0;
    } else {
      *(void**)data[i] = NULL;
    }
  }
  return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerSetAttribute(const void* value, CUpointer_attribute attribute,
                                      CUdeviceptr address) {
  (void)value;
  DRV_USE(0);
  if (!pointer_look_up(address).type) return CUDA_ERROR_INVALID_VALUE;
  return attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
             ? CUDA_SUCCESS  // every copy here is synchronous
             : not_implemented("cuPointerSetAttribute(other)");
}

EXPORT CUresult cuMemGetAddressRange(CUdeviceptr* start, size_t* size,
                                     CUdeviceptr address) {
  DRV_USE(0);
  Pointer p = pointer_look_up(address);
  if (!p.type) return CUDA_ERROR_NOT_FOUND;
  if (start) *start = p.start;
  if (size) *size = p.size;
  return CUDA_SUCCESS;
}
