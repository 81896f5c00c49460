// Memory pools: exact in bytes; a pool keeps what its threshold allows.
#include <stdlib.h>

#include "memory/graph_memory.h"
#include "memory/memory.h"
#include "state/account.h"
#include "state/context.h"
#include "state/driver.h"

struct CUmemPoolHandle_st {
  int device;
  uint64_t threshold, used, kept, used_high, reserved_high;
  int reuse_is_off[3];  // as set; nothing here runs behind the program's back
};
static struct CUmemPoolHandle_st default_pool[MAX_DEVICES];

CUmemoryPool pool_of(int ordinal) {
  int device = device_index(ordinal);
  default_pool[device].device = device;
  return &default_pool[device];
}

int pool_device(CUmemoryPool pool) { return pool->device; }

static uint64_t pool_reserved(const struct CUmemPoolHandle_st* pool) {
  return pool->used + pool->kept;
}

static void pool_trim(struct CUmemPoolHandle_st* pool, uint64_t keep) {
  if (pool_reserved(pool) <= keep) return;
  uint64_t give = MIN(pool->kept, pool_reserved(pool) - keep);
  pool->kept -= give;
  charge(pool->device, -(int64_t)give, "cudaMallocAsync");
}

static CUresult allocate_locked(struct CUmemPoolHandle_st* pool, uint64_t size,
                                uint64_t* address) {
  uint64_t bytes = round_up(size, config.device[pool->device].malloc_block);
  // What the pool kept is given back first, so it can be taken again at once.
  uint64_t kept = MIN(pool->kept, bytes);
  charge(pool->device, -(int64_t)kept, "cudaMallocAsync");
  CUresult error = block_take(pool->device, bytes, "cudaMallocAsync", address);
  if (error) {
    charge(pool->device, (int64_t)kept, "cudaMallocAsync");
    return error;
  }
  pool->kept -= kept;
  pool->used += bytes;
  pool->used_high = MAX(pool->used_high, pool->used);
  pool->reserved_high = MAX(pool->reserved_high, pool_reserved(pool));
  Mapping* m = ranges_at(&mappings, *address)->data;
  m->by = BY_POOL;
  m->owner = pool;
  m->requested = size;
  return CUDA_SUCCESS;
}

CUresult pool_allocate(CUmemoryPool pool, uint64_t size, uint64_t* address) {
  if (!size) return CUDA_ERROR_INVALID_VALUE;
  uint64_t start;
  pthread_mutex_lock(&memory_lock);
  CUresult error = allocate_locked(pool, size, &start);
  pthread_mutex_unlock(&memory_lock);
  if (!error) *address = start;
  return error;
}

bool pool_free_later(uint64_t address) {
  pthread_mutex_lock(&memory_lock);
  Range* r = ranges_at(&mappings, address);
  Mapping* m = r ? r->data : NULL;
  bool later = m && r->start == address && m->by == BY_POOL && !m->freed;
  if (later) m->freed = true;
  pthread_mutex_unlock(&memory_lock);
  return later;
}

CUresult memory_free_either(uint64_t address) {
  pthread_mutex_lock(&memory_lock);
  Range* r = ranges_at(&mappings, address);
  Mapping* m = r ? r->data : NULL;
  if (!m || r->start != address || m->by != BY_POOL) {
    bool graphs = !m || m->by == BY_GRAPH;
    pthread_mutex_unlock(&memory_lock);
    return graphs && address ? graph_memory_free(address) : memory_free(address);
  }
  struct CUmemPoolHandle_st* pool = m->owner;
  uint64_t size = r->size;
  ranges_remove(&mappings, address);
  address_give(address, round_up(size, 2ull << 20));
  pool->used -= size;
  physical_give(m->physical);
  if (pool_reserved(pool) + size <= pool->threshold &&
      charge(pool->device, (int64_t)size, "cudaMallocAsync"))
    pool->kept += size;
  pool_trim(pool, MAX(pool->threshold, pool->used));
  free(m);
  pthread_mutex_unlock(&memory_lock);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice ordinal) {
  DRV_USE(0);
  if (ordinal < 0 || ordinal >= visible_devices()) return CUDA_ERROR_INVALID_DEVICE;
  *pool = pool_of(ordinal);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice ordinal) {
  return cuDeviceGetDefaultMemPool(pool, ordinal);
}

EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) {
  DRV_USE(0);
  pthread_mutex_lock(&memory_lock);
  pool_trim(pool, keep);
  pthread_mutex_unlock(&memory_lock);
  return CUDA_SUCCESS;
}

static bool is_reuse(CUmemPool_attribute attribute) {
  return attribute >= CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES &&
         attribute <= CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
}

EXPORT CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute,
                                      void* value) {
  DRV_USE(0);
  if (!pool || !value) return CUDA_ERROR_INVALID_VALUE;
  if (is_reuse(attribute)) {
    pool->reuse_is_off[attribute - 1] = !*(int*)value;
    return CUDA_SUCCESS;
  }
  switch (attribute) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      pool->threshold = *(uint64_t*)value;
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
      if (*(uint64_t*)value) return CUDA_ERROR_INVALID_VALUE;
      pool->reserved_high = pool_reserved(pool);
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      if (*(uint64_t*)value) return CUDA_ERROR_INVALID_VALUE;
      pool->used_high = pool->used;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

EXPORT CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute,
                                      void* value) {
  DRV_USE(0);
  if (!pool || !value) return CUDA_ERROR_INVALID_VALUE;
  if (is_reuse(attribute)) {
    *(int*)value = !pool->reuse_is_off[attribute - 1];
    return CUDA_SUCCESS;
  }
  uint64_t* bytes = value;
  switch (attribute) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      *bytes = pool->threshold;
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
      *bytes = pool_reserved(pool);
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
      *bytes = pool->reserved_high;
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
      *bytes = pool->used;
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      *bytes = pool->used_high;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

EXPORT CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc* access,
                                   size_t n) {
  (void)pool;
  (void)access;
  (void)n;
  DRV_USE(0);
  return CUDA_SUCCESS;
}

EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int ordinal) {
  RT_ENTER(0);
  RT(driver()->cuDeviceGetDefaultMemPool(pool, ordinal));
}

EXPORT cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* pool, int ordinal) {
  RT_ENTER(0);
  RT(driver()->cuDeviceGetMemPool(pool, ordinal));
}

EXPORT cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t keep) {
  RT_ENTER(0);
  RT(driver()->cuMemPoolTrimTo(pool, keep));
}

// The attributes and the description of access have the driver's numbers and layout.
EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool,
                                           enum cudaMemPoolAttr attribute,
                                           void* value) {
  RT_ENTER(0);
  RT(driver()->cuMemPoolSetAttribute(pool, (CUmemPool_attribute)attribute, value));
}

EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool,
                                           enum cudaMemPoolAttr attribute,
                                           void* value) {
  RT_ENTER(0);
  RT(driver()->cuMemPoolGetAttribute(pool, (CUmemPool_attribute)attribute, value));
}

EXPORT cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool,
                                        const struct cudaMemAccessDesc* access,
                                        size_t n) {
  RT_ENTER(0);
  RT(driver()->cuMemPoolSetAccess(pool, (const CUmemAccessDesc*)access, n));
}
