// cudaMalloc and its kin.
#include <stdlib.h>

#include "memory/memory.h"
#include "state/captures.h"
#include "state/config.h"
#include "state/context.h"
#include "state/driver.h"

enum { SMALL_ALIGN = 512 };

// Blocks of malloc_block bytes that small cudaMallocs share. A gap in addresses
// follows each, so that free parts of two blocks never merge.
typedef struct {
  Physical* physical;
  uint64_t live;
} Slab;
enum { SLAB_GAP = 2 << 20 };
static Ranges slabs[MAX_DEVICES], slab_heap[MAX_DEVICES];

CUresult block_take(int device, uint64_t size, const char* cause, uint64_t* address) {
  Physical* p = physical_take(device, size, cause);
  if (!p) return CUDA_ERROR_OUT_OF_MEMORY;
  uint64_t span = round_up(size, 2ull << 20);
  *address = address_take(span, 0);
  if (!*address) {
    physical_give(p);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  mapping_add(*address, size, p)->by = BY_MALLOC;
  return CUDA_SUCCESS;
}

static uint64_t slab_span(int device) {
  return round_up(config.device[device].malloc_block, SLAB_GAP) + SLAB_GAP;
}

static CUresult slab_add(int device, const char* cause) {
  uint64_t block = config.device[device].malloc_block;
  Physical* p = physical_take(device, block, cause);
  if (!p) return CUDA_ERROR_OUT_OF_MEMORY;
  uint64_t start = address_take(slab_span(device), 0);
  Slab* slab = calloc(1, sizeof *slab);
  if (!slab) abort();
  if (!start) {
    free(slab);
    physical_give(p);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  slab->physical = p;
  ranges_add(&slabs[device], start, block, slab);
  heap_give(&slab_heap[device], start, block);
  return CUDA_SUCCESS;
}

static void slab_remove(int device, uint64_t start) {
  Slab* slab = ranges_remove(&slabs[device], start);
  ranges_remove(&slab_heap[device], start);
  address_give(start, slab_span(device));
  physical_give(slab->physical);
  free(slab);
}

static CUresult allocate_small(int device, uint64_t size, const char* cause,
                               uint64_t* address) {
  uint64_t start = heap_take(&slab_heap[device], size);
  if (start == UINT64_MAX) {
    CUresult error = slab_add(device, cause);
    if (error) return error;
    start = heap_take(&slab_heap[device], size);
  }
  Range* r = ranges_at(&slabs[device], start);
  Slab* slab = r->data;
  slab->live += size;
  Mapping* m = mapping_add(start, size, slab->physical);
  m->offset = start - r->start;
  m->by = BY_MALLOC;
  m->owner = slab;
  *address = start;
  return CUDA_SUCCESS;
}

static void free_small(uint64_t address, uint64_t size, const Mapping* m) {
  Slab* slab = m->owner;
  int device = slab->physical->device;
  heap_give(&slab_heap[device], address, size);
  slab->live -= size;
  if (!slab->live) slab_remove(device, address - m->offset);
}

CUresult memory_allocate(int device, uint64_t size, const char* cause,
                         uint64_t* address) {
  uint64_t block = config.device[device].malloc_block;
  *address = 0;
  if (size == 0) return CUDA_SUCCESS;
  if (size > ADDRESS_BYTES) return CUDA_ERROR_OUT_OF_MEMORY;
  pthread_mutex_lock(&memory_lock);
  CUresult error;
  if (block > SMALL_ALIGN && size <= block / 2)
    error = allocate_small(device, round_up(size, SMALL_ALIGN), cause, address);
  else
    error = block_take(device, round_up(size, block), cause, address);
  if (!error) {
    Mapping* m = ranges_at(&mappings, *address)->data;
    m->requested = size;
  }
  pthread_mutex_unlock(&memory_lock);
  return error;
}

CUresult memory_free(uint64_t address) {
  if (!address) return CUDA_SUCCESS;
  pthread_mutex_lock(&memory_lock);
  Range* r = ranges_at(&mappings, address);
  Mapping* m = r ? r->data : NULL;
  if (!m || r->start != address || m->by != BY_MALLOC) {
    pthread_mutex_unlock(&memory_lock);
    return CUDA_ERROR_INVALID_VALUE;
  }
  uint64_t size = r->size;
  ranges_remove(&mappings, address);
  if (m->owner) {
    free_small(address, size, m);
  } else {
    address_give(address, round_up(size, 2ull << 20));
    physical_give(m->physical);
  }
  free(m);
  pthread_mutex_unlock(&memory_lock);
  return CUDA_SUCCESS;
}

// ---- the calls

static __thread bool asked_by_runtime;  // the cause is the program's own call

EXPORT cudaError_t cudaMalloc(void** address, size_t size) {
  RT_ENTER(size);
  *address = NULL;
  if (!size) RT(unsafe_call());
  asked_by_runtime = true;
  CUresult error = driver()->cuMemAlloc((CUdeviceptr*)address, size);
  asked_by_runtime = false;
  RT(error);
}

EXPORT CUresult cuMemAlloc(CUdeviceptr* address, size_t size) {
  DRV_ENTER(size);
  if (!size) return CUDA_ERROR_INVALID_VALUE;
  CUresult error = unsafe_call();
  if (error) return error;
  uint64_t start;
  const char* cause = asked_by_runtime ? "cudaMalloc" : "cuMemAlloc";
  error = memory_allocate(current_device(), size, cause, &start);
  if (!error) *address = start;
  return error;
}
