// Device memory: physical bytes, the addresses that map to them, copies, fills,
// cudaMalloc and its kin, pinned host memory, memory pools.
//
// Physical memory is one lazily zeroed host mapping a device; device addresses
// are a separate range no one can touch. A copy looks its addresses up, so
// unmapping is exact and costs no system call.
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "driver.h"
#include "vgpu.h"

// First fit needs at most log2(largest / smallest) times the live bytes.
enum { PHYSICAL_FACTOR = 32, SMALL_ALIGN = 512, PAGE = 4096 };
static const uint64_t ADDRESS_BYTES = 1ull << 45;

pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
Ranges mappings, reserved;

static uint64_t address_start, address_bytes;
static Ranges address_heap;
static struct {
  char* start;
  Ranges heap;
  uint64_t bytes;
} physical_memory[MAX_DEVICES];

// Blocks of malloc_block bytes that small cudaMallocs share. A gap in addresses
// follows each, so that free parts of two blocks never merge.
typedef struct {
  Physical* physical;
  uint64_t live;
} Slab;
enum { SLAB_GAP = 2 << 20 };
static Ranges slabs[MAX_DEVICES], slab_heap[MAX_DEVICES];

static void* map_host(uint64_t bytes, int protection) {
  void* start =
      mmap(NULL, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return NULL;
  madvise(start, bytes, MADV_DONTFORK);
  madvise(start, bytes, MADV_DONTDUMP);
  return start;
}

bool memory_init(void) {
  void* start = NULL;
  for (address_bytes = ADDRESS_BYTES; !start && address_bytes >> 32;) {
    start = map_host(address_bytes, PROT_NONE);
    if (!start) address_bytes /= 2;
  }
  if (!start) {
    message("no address space for a device: raise the limit (ulimit -v)");
    return false;
  }
  const uint64_t align = 2ull << 20;
  address_start = ((uint64_t)start + align) / align * align;
  address_bytes = (address_bytes - align) / align * align;
  heap_give(&address_heap, address_start, address_bytes);
  return true;
}

static bool physical_init(int device) {
  if (physical_memory[device].start) return true;
  uint64_t memory = MAX(config.device[device].memory, 1u << 20);
  for (uint64_t factor = PHYSICAL_FACTOR; factor; factor /= 2) {
    char* start = map_host(memory * factor, PROT_READ | PROT_WRITE);
    if (!start) continue;
    physical_memory[device].start = start;
    physical_memory[device].bytes = memory * factor;
    heap_give(&physical_memory[device].heap, 0, memory * factor);
    return true;
  }
  message(
      "no host address space for device %d: needed %lu bytes; raise the "
      "limit (ulimit -v) or allow overcommit (vm.overcommit_memory)",
      device, memory);
  return false;
}

bool is_device_address(uint64_t address) {
  return address - address_start < address_bytes;
}

uint64_t address_take(uint64_t size, uint64_t alignment) {
  uint64_t start = alignment > 2ull << 20
                       ? heap_take_aligned(&address_heap, size, alignment)
                       : heap_take(&address_heap, size);
  return start == UINT64_MAX ? 0 : start;
}

void address_give(uint64_t start, uint64_t size) {
  heap_give(&address_heap, start, size);
}

Physical* physical_take(int device, uint64_t size, const char* cause) {
  if (!physical_init(device)) return NULL;
  if (!charge(device, (int64_t)size, cause)) return NULL;
  uint64_t offset = heap_take(&physical_memory[device].heap, size);
  if (offset == UINT64_MAX) abort();  // PHYSICAL_FACTOR rules it out
  Physical* p = calloc(1, sizeof *p);
  if (!p) abort();
  *p = (Physical){.device = device,
                  .size = size,
                  .offset = offset,
                  .references = 1,
                  .cause = cause};
  return p;
}

static void forget(Physical* p) {
  if (!p->written) return;
  char* start = physical_memory[p->device].start + p->offset;
  char* from = (char*)(((uint64_t)start + PAGE - 1) & ~(uint64_t)(PAGE - 1));
  char* to = (char*)((uint64_t)(start + p->size) & ~(uint64_t)(PAGE - 1));
  if (to <= from) {
    memset(start, 0, p->size);
  } else {
    madvise(from, to - from, MADV_DONTNEED);
    memset(start, 0, from - start);
    memset(to, 0, start + p->size - to);
  }
  p->written = false;
}

void physical_give(Physical* p) {
  if (--p->references) return;
  forget(p);
  heap_give(&physical_memory[p->device].heap, p->offset, p->size);
  charge(p->device, -(int64_t)p->size, p->cause);
  free(p);
}

static Mapping* mapping_add(uint64_t address, uint64_t size, Physical* physical) {
  Mapping* m = calloc(1, sizeof *m);
  if (!m) abort();
  m->physical = physical;
  m->readable = m->writable = true;
  ranges_add(&mappings, address, size, m);
  return m;
}

// ---- cudaMalloc

static uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

static CUresult allocate_block(int device, uint64_t size, const char* cause,
                               uint64_t* address) {
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
    error = allocate_block(device, round_up(size, block), cause, address);
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

// ---- contents

typedef struct {
  char* start;
  uint64_t size;
  Physical* physical;  // NULL: host memory
} Span;

static void illegal(uint64_t address, uint64_t size, const char* why) {
  Range* near = ranges_below(&mappings, address);
  Range* above = ranges_above(&mappings, address);
  if (!near || (above && above->start - address <
                             address - MIN(address, near->start + near->size)))
    near = above;
  if (near)
    message("illegal address 0x%lx, %lu bytes: %s; nearest mapping 0x%lx, %lu bytes",
            address, size, why, near->start, near->size);
  else
    message("illegal address 0x%lx, %lu bytes: %s; nothing is mapped", address, size,
            why);
  sticky_error(CUDA_ERROR_ILLEGAL_ADDRESS);
}

// The contiguous memory at an address, at most `size` bytes of it.
static bool span_at(uint64_t address, uint64_t size, bool write, Span* span) {
  if (!is_device_address(address)) {
    *span = (Span){(char*)address, size, NULL};
    return true;
  }
  Range* r = ranges_at(&mappings, address);
  if (!r) return false;
  Mapping* m = r->data;
  if (write ? !m->writable : !m->readable) return false;
  uint64_t skip = address - r->start;
  Physical* p = m->physical;
  *span = (Span){physical_memory[p->device].start + p->offset + m->offset + skip,
                 MIN(size, r->size - skip), p};
  return true;
}

static bool check(uint64_t address, uint64_t size, bool write) {
  Span span;
  for (uint64_t done = 0; done < size; done += span.size) {
    if (span_at(address + done, size - done, write, &span)) continue;
    bool mapped = ranges_at(&mappings, address + done);
    bool known = ranges_at(&reserved, address + done);
    illegal(address, size,
            mapped  ? "mapped without access"
            : known ? "reserved but not mapped"
                    : "not allocated");
    return false;
  }
  return true;
}

static void zero(const Span* span) {
  if (span->physical && !span->physical->written) return;
  char* from = (char*)(((uint64_t)span->start + PAGE - 1) & ~(uint64_t)(PAGE - 1));
  char* to = (char*)((uint64_t)(span->start + span->size) & ~(uint64_t)(PAGE - 1));
  if (!span->physical || span->size < (1u << 20)) {
    memset(span->start, 0, span->size);
    return;
  }
  madvise(from, to - from, MADV_DONTNEED);
  memset(span->start, 0, from - span->start);
  memset(to, 0, span->start + span->size - to);
  if (span->size == span->physical->size) span->physical->written = false;
}

CUresult memory_copy(uint64_t to, uint64_t from, uint64_t size) {
  pthread_mutex_lock(&memory_lock);
  if (!check(to, size, true) || !check(from, size, false)) {
    pthread_mutex_unlock(&memory_lock);
    return CUDA_ERROR_ILLEGAL_ADDRESS;
  }
  for (uint64_t done = 0; done < size;) {
    Span target, source;
    span_at(to + done, size - done, true, &target);
    span_at(from + done, target.size, false, &source);
    target.size = source.size;
    if (source.physical && !source.physical->written) {
      zero(&target);
    } else {
      if (target.physical) target.physical->written = true;
      memmove(target.start, source.start, source.size);
    }
    done += source.size;
  }
  pthread_mutex_unlock(&memory_lock);
  return CUDA_SUCCESS;
}

CUresult memory_fill(uint64_t to, uint64_t value, int value_bytes, uint64_t n) {
  uint64_t size = n * value_bytes;
  pthread_mutex_lock(&memory_lock);
  if (!check(to, size, true)) {
    pthread_mutex_unlock(&memory_lock);
    return CUDA_ERROR_ILLEGAL_ADDRESS;
  }
  for (uint64_t done = 0; done < size;) {
    Span span;
    span_at(to + done, size - done, true, &span);
    if (value == 0) {
      zero(&span);
    } else {
      if (span.physical) span.physical->written = true;
      if (value_bytes == 1)
        memset(span.start, (int)value, span.size);
      else
        for (uint64_t i = 0; i < span.size; i++)
          span.start[i] = ((char*)&value)[(done + i) % value_bytes];
    }
    done += span.size;
  }
  pthread_mutex_unlock(&memory_lock);
  return CUDA_SUCCESS;
}

bool memory_is_zero(uint64_t from, uint64_t size) {
  bool known = true;
  pthread_mutex_lock(&memory_lock);
  for (uint64_t done = 0; known && done < size;) {
    Span span;
    known = span_at(from + done, size - done, false, &span) && span.physical &&
            !span.physical->written;
    if (known) done += span.size;
  }
  pthread_mutex_unlock(&memory_lock);
  return known;
}

// ---- allocations and what is free

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

EXPORT cudaError_t cudaFree(void* address) {
  RT_ENTER(0);
  RT(address ? driver()->cuMemFree((CUdeviceptr)address) : 0);
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

EXPORT CUresult cuMemFree(CUdeviceptr address) {
  DRV_ENTER(0);
  CUresult error = unsafe_call();
  return error ? error : memory_free(address);
}

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

// ---- pinned, registered and managed host memory

typedef struct {
  uint64_t size;
  int device;
  enum { PINNED, REGISTERED, MANAGED } kind;
  bool charged;
} HostBlock;
static Ranges host_blocks;

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
  // On unified memory, pinned memory is device memory.
  bool charged = config.device[device].integrated && kind == PINNED;
  uint64_t bytes = round_up(size, PAGE);
  if (charged && !charge(device, (int64_t)bytes, cause))
    return CUDA_ERROR_OUT_OF_MEMORY;
  *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
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

EXPORT cudaError_t cudaHostAlloc(void** address, size_t size, unsigned flags) {
  RT_ENTER(size);
  RT(driver()->cuMemHostAlloc(address, size, flags));
}

EXPORT cudaError_t cudaMallocHost(void** address, size_t size) {
  RT_ENTER(size);
  RT(driver()->cuMemHostAlloc(address, size, 0));
}

EXPORT cudaError_t cudaFreeHost(void* address) {
  RT_ENTER(0);
  RT(address ? driver()->cuMemFreeHost(address) : 0);
}

EXPORT CUresult cuMemHostAlloc(void** address, size_t size, unsigned flags) {
  (void)flags;
  DRV_ENTER(size);
  return host_allocate(address, size, PINNED, "cudaHostAlloc");
}

EXPORT CUresult cuMemFreeHost(void* address) {
  DRV_ENTER(0);
  return host_release(address, false, "cudaHostAlloc");
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

// ---- what a pointer is

typedef struct {
  CUmemorytype type;  // 0: unknown to CUDA
  int device;
  uint64_t start, size;
  bool managed, by_map;
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
                      m->by == BY_MAP};
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
      return cuDevicePrimaryCtxRetain(data, ordinal_of(p->device));
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
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      *(int*)data = 0;
      return CUDA_SUCCESS;
    default:
      return not_implemented("cuPointerGetAttribute(other)");
  }
}

EXPORT CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute,
                                      CUdeviceptr address) {
  DRV_ENTER(0);
  Pointer p = pointer_look_up(address);
  return p.type ? pointer_attribute(data, attribute, &p, address)
                : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute* attributes,
                                       void** data, CUdeviceptr address) {
  DRV_ENTER(0);
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
  DRV_ENTER(0);
  if (!pointer_look_up(address).type) return CUDA_ERROR_INVALID_VALUE;
  return attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
             ? CUDA_SUCCESS  // every copy here is synchronous
             : not_implemented("cuPointerSetAttribute(other)");
}

EXPORT CUresult cuMemGetAddressRange(CUdeviceptr* start, size_t* size,
                                     CUdeviceptr address) {
  DRV_ENTER(0);
  Pointer p = pointer_look_up(address);
  if (!p.type) return CUDA_ERROR_NOT_FOUND;
  if (start) *start = p.start;
  if (size) *size = p.size;
  return CUDA_SUCCESS;
}

// ---- copies and fills

static CUresult copy(void* to, const void* from, size_t size, void* stream) {
  if (!size) return CUDA_SUCCESS;
  return stream_run(
      stream,
      &(Operation){
          .kind = NODE_COPY, .to = (uint64_t)to, .from = (uint64_t)from, .size = size});
}

static CUresult fill(uint64_t to, uint64_t value, int value_bytes, size_t n,
                     void* stream) {
  if (!n) return CUDA_SUCCESS;
  return stream_run(stream, &(Operation){.kind = NODE_FILL,
                                         .to = to,
                                         .size = n,
                                         .value = value,
                                         .value_bytes = value_bytes});
}

EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t size,
                              enum cudaMemcpyKind kind) {
  (void)kind;
  RT_ENTER(size);
  RT(copy(to, from, size, NULL));
}

EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size,
                                   enum cudaMemcpyKind kind, cudaStream_t stream) {
  (void)kind;
  RT_ENTER(size);
  RT(copy(to, from, size, stream));
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from,
                                       int from_device, size_t size,
                                       cudaStream_t stream) {
  (void)to_device;
  (void)from_device;
  RT_ENTER(size);
  RT(copy(to, from, size, stream));
}

EXPORT cudaError_t cudaMemcpyPeer(void* to, int to_device, const void* from,
                                  int from_device, size_t size) {
  (void)to_device;
  (void)from_device;
  RT_ENTER(size);
  RT(copy(to, from, size, NULL));
}

static CUresult copy_2d(char* to, size_t to_pitch, const char* from, size_t from_pitch,
                        size_t width, size_t height, void* stream) {
  CUresult error = CUDA_SUCCESS;
  for (size_t row = 0; row < height && !error; row++)
    error = copy(to + row * to_pitch, from + row * from_pitch, width, stream);
  return error;
}

EXPORT cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from,
                                     size_t from_pitch, size_t width, size_t height,
                                     enum cudaMemcpyKind kind, cudaStream_t stream) {
  (void)kind;
  RT_ENTER(width * height);
  RT(copy_2d(to, to_pitch, from, from_pitch, width, height, stream));
}

EXPORT cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from,
                                size_t from_pitch, size_t width, size_t height,
                                enum cudaMemcpyKind kind) {
  (void)kind;
  RT_ENTER(width * height);
  RT(copy_2d(to, to_pitch, from, from_pitch, width, height, NULL));
}

EXPORT cudaError_t cudaMemset(void* to, int value, size_t n) {
  RT_ENTER(n);
  RT(fill((uint64_t)to, value & 0xff, 1, n, NULL));
}

EXPORT cudaError_t cudaMemsetAsync(void* to, int value, size_t n, cudaStream_t stream) {
  RT_ENTER(n);
  RT(fill((uint64_t)to, value & 0xff, 1, n, stream));
}

#define DRV_COPY(name, parameters, to, from)         \
  EXPORT CUresult name parameters {                  \
    DRV_ENTER(size);                                 \
    return copy((void*)to, (void*)from, size, NULL); \
  }
#define DRV_COPY_ASYNC(name, parameters, to, from)     \
  EXPORT CUresult name parameters {                    \
    DRV_ENTER(size);                                   \
    return copy((void*)to, (void*)from, size, stream); \
  }
DRV_COPY(cuMemcpy, (CUdeviceptr to, CUdeviceptr from, size_t size), to, from)
DRV_COPY(cuMemcpyDtoD, (CUdeviceptr to, CUdeviceptr from, size_t size), to, from)
DRV_COPY(cuMemcpyDtoH, (void* to, CUdeviceptr from, size_t size), to, from)
DRV_COPY(cuMemcpyHtoD, (CUdeviceptr to, const void* from, size_t size), to, from)
DRV_COPY_ASYNC(cuMemcpyAsync,
               (CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream), to,
               from)
DRV_COPY_ASYNC(cuMemcpyDtoDAsync,
               (CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream), to,
               from)
DRV_COPY_ASYNC(cuMemcpyDtoHAsync,
               (void* to, CUdeviceptr from, size_t size, CUstream stream), to, from)
DRV_COPY_ASYNC(cuMemcpyHtoDAsync,
               (CUdeviceptr to, const void* from, size_t size, CUstream stream), to,
               from)

#define DRV_FILL(name, type)                                   \
  EXPORT CUresult name(CUdeviceptr to, type value, size_t n) { \
    DRV_ENTER(n * sizeof value);                               \
    return fill(to, value, sizeof value, n, NULL);             \
  }
#define DRV_FILL_ASYNC(name, type)                                              \
  EXPORT CUresult name(CUdeviceptr to, type value, size_t n, CUstream stream) { \
    DRV_ENTER(n * sizeof value);                                                \
    return fill(to, value, sizeof value, n, stream);                            \
  }
DRV_FILL(cuMemsetD8, unsigned char)
DRV_FILL(cuMemsetD16, unsigned short)
DRV_FILL(cuMemsetD32, unsigned)
DRV_FILL_ASYNC(cuMemsetD8Async, unsigned char)
DRV_FILL_ASYNC(cuMemsetD16Async, unsigned short)
DRV_FILL_ASYNC(cuMemsetD32Async, unsigned)

EXPORT CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr to, cuuint32_t value,
                                     unsigned flags) {
  (void)flags;
  DRV_ENTER(sizeof value);
  return fill(to, value, sizeof value, 1, stream);
}

// ---- memory pools: exact in bytes; a pool keeps what its threshold allows

struct CUmemPoolHandle_st {
  int device;
  uint64_t threshold, used, kept, used_high, reserved_high;
};
static struct CUmemPoolHandle_st default_pool[MAX_DEVICES];

static struct CUmemPoolHandle_st* pool_of(int ordinal) {
  int device = device_index(ordinal);
  default_pool[device].device = device;
  return &default_pool[device];
}

static uint64_t pool_reserved(const struct CUmemPoolHandle_st* pool) {
  return pool->used + pool->kept;
}

static void pool_trim(struct CUmemPoolHandle_st* pool, uint64_t keep) {
  if (pool_reserved(pool) <= keep) return;
  uint64_t give = MIN(pool->kept, pool_reserved(pool) - keep);
  pool->kept -= give;
  charge(pool->device, -(int64_t)give, "cudaMallocAsync");
}

static CUresult pool_allocate(struct CUmemPoolHandle_st* pool, uint64_t size,
                              uint64_t* address) {
  uint64_t bytes = round_up(size, config.device[pool->device].malloc_block);
  // What the pool kept is given back first, so it can be taken again at once.
  uint64_t kept = MIN(pool->kept, bytes);
  charge(pool->device, -(int64_t)kept, "cudaMallocAsync");
  CUresult error = allocate_block(pool->device, bytes, "cudaMallocAsync", address);
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

static CUresult malloc_async(CUdeviceptr* address, size_t size, CUmemoryPool pool) {
  if (!size) return CUDA_ERROR_INVALID_VALUE;
  uint64_t start;
  pthread_mutex_lock(&memory_lock);
  CUresult error = pool_allocate(pool, size, &start);
  pthread_mutex_unlock(&memory_lock);
  if (!error) *address = start;
  return error;
}

static CUresult free_async(uint64_t address) {
  pthread_mutex_lock(&memory_lock);
  Range* r = ranges_at(&mappings, address);
  Mapping* m = r ? r->data : NULL;
  if (!m || r->start != address || m->by != BY_POOL) {
    pthread_mutex_unlock(&memory_lock);
    return memory_free(address);
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

EXPORT CUresult cuMemAllocAsync(CUdeviceptr* address, size_t size, CUstream stream) {
  (void)stream;
  DRV_ENTER(size);
  return malloc_async(address, size, pool_of(current_ordinal()));
}

EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr* address, size_t size,
                                        CUmemoryPool pool, CUstream stream) {
  (void)stream;
  DRV_ENTER(size);
  return malloc_async(address, size, pool);
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
  (void)stream;
  DRV_ENTER(0);
  return free_async(address);
}

EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice ordinal) {
  DRV_ENTER(0);
  if (ordinal < 0 || ordinal >= visible_devices()) return CUDA_ERROR_INVALID_DEVICE;
  *pool = pool_of(ordinal);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice ordinal) {
  return cuDeviceGetDefaultMemPool(pool, ordinal);
}

EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) {
  DRV_ENTER(0);
  pthread_mutex_lock(&memory_lock);
  pool_trim(pool, keep);
  pthread_mutex_unlock(&memory_lock);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute,
                                      void* value) {
  DRV_ENTER(0);
  switch (attribute) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      pool->threshold = *(uint64_t*)value;
      break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
      pool->reserved_high = pool_reserved(pool);
      break;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      pool->used_high = pool->used;
      break;
    default:;  // the reuse policies: nothing here runs behind the program's back
  }
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute,
                                      void* value) {
  DRV_ENTER(0);
  switch (attribute) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      *(uint64_t*)value = pool->threshold;
      break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
      *(uint64_t*)value = pool_reserved(pool);
      break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
      *(uint64_t*)value = pool->reserved_high;
      break;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
      *(uint64_t*)value = pool->used;
      break;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      *(uint64_t*)value = pool->used_high;
      break;
    default:
      *(int*)value = 1;
  }
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc* access,
                                   size_t n) {
  (void)pool;
  (void)access;
  (void)n;
  DRV_ENTER(0);
  return CUDA_SUCCESS;
}

EXPORT cudaError_t cudaMallocAsync(void** address, size_t size, cudaStream_t stream) {
  RT_ENTER(size);
  *address = NULL;
  RT(size ? driver()->cuMemAllocAsync((CUdeviceptr*)address, size, stream) : 0);
}

EXPORT cudaError_t cudaMallocFromPoolAsync(void** address, size_t size,
                                           cudaMemPool_t pool, cudaStream_t stream) {
  RT_ENTER(size);
  *address = NULL;
  if (!size) return cudaSuccess;
  RT(driver()->cuMemAllocFromPoolAsync((CUdeviceptr*)address, size, pool, stream));
}

EXPORT cudaError_t cudaFreeAsync(void* address, cudaStream_t stream) {
  RT_ENTER(0);
  RT(address ? driver()->cuMemFreeAsync((CUdeviceptr)address, stream) : 0);
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

// ---- graph memory nodes are absent, so graphs hold none

EXPORT cudaError_t cudaDeviceGetGraphMemAttribute(
    int device, enum cudaGraphMemAttributeType attribute, void* value) {
  (void)device;
  (void)attribute;
  RT_ENTER(0);
  *(uint64_t*)value = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSetGraphMemAttribute(
    int device, enum cudaGraphMemAttributeType attribute, void* value) {
  (void)device;
  (void)attribute;
  (void)value;
  RT_ENTER(0);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGraphMemTrim(int device) {
  (void)device;
  RT_ENTER(0);
  return cudaSuccess;
}
