// What memory holds: copies and fills, and whether their addresses may be touched.
#include <string.h>
#include <sys/mman.h>

#include "memory/memory.h"
#include "state/config.h"
#include "state/context.h"

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
  *span = (Span){physical_start(p) + m->offset + skip, MIN(size, r->size - skip), p};
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

static bool is_zero(const char* start, uint64_t size) {
  return !start[0] && !memcmp(start, start + 1, size - 1);
}

// The whole pages of memory that CUDA knows: shared ones can be given back.
static bool host_pages(char* start, uint64_t size, char** from, char** to) {
  char* end = start + size;
  *from = start + (PAGE - (uint64_t)start % PAGE) % PAGE;
  *to = end - (uint64_t)end % PAGE;
  return *from < *to && ranges_at(&host_blocks, (uint64_t)start);
}

// Makes no page of the host that is not there. Reading one that is shared makes it.
static void zero_host(char* start, uint64_t size) {
  char *end = start + size, *from, *to;
  bool removed =
      host_pages(start, size, &from, &to) && !madvise(from, to - from, MADV_REMOVE);
  for (char *at = start, *next; at < end; at = next) {
    next = MIN(end, at + PAGE - (uint64_t)at % PAGE);
    if (removed && at == from)
      next = to;
    else if (!is_zero(at, next - at))
      memset(at, 0, next - at);
  }
}

static void zero(const Span* span) {
  if (!span->physical) {
    zero_host(span->start, span->size);
    return;
  }
  if (!span->physical->written) return;
  char* from = (char*)(((uint64_t)span->start + PAGE - 1) & ~(uint64_t)(PAGE - 1));
  char* to = (char*)((uint64_t)(span->start + span->size) & ~(uint64_t)(PAGE - 1));
  if (span->size < (1u << 20)) {
    memset(span->start, 0, span->size);
    return;
  }
  physical_zero(span->physical, from, to - from);
  memset(span->start, 0, from - span->start);
  memset(to, 0, span->start + span->size - to);
  if (span->size == span->physical->size && !span->physical->shared)
    span->physical->written = false;
}

enum { HOST_CHUNK = 16 << 20 };

// Whether a page is there; the caller holds memory_lock.
static bool resident(char* from, char* to) {
  static unsigned char there[HOST_CHUNK / PAGE];
  if (mincore(from, to - from, there)) return true;
  for (long i = 0; i < (to - from) / PAGE; i++)
    if (there[i] & 1) return true;
  return false;
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
    bool from_host = !source.physical && target.physical;
    if (from_host) source.size = MIN(source.size, HOST_CHUNK);
    target.size = source.size;
    bool unwritten = source.physical && !source.physical->written;
    // Reading makes pages of shared memory, which are given back.
    char *first, *last;
    bool absent = from_host && host_pages(source.start, source.size, &first, &last) &&
                  !resident(first, last);
    if (unwritten || is_zero(source.start, source.size)) {
      if (absent) madvise(first, last - first, MADV_REMOVE);
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

// The contiguous memory at an address that a kernel may touch.
static bool span_of_kernel(uint64_t address, bool write, Span* span) {
  if (is_device_address(address)) return span_at(address, UINT64_MAX, write, span);
  Range* r = ranges_at(&host_blocks, address);
  if (r) *span = (Span){(char*)address, r->start + r->size - address, NULL};
  return r;
}

// For kernels that the host computes: replaces addresses of elements by those where the
// host finds them. Returns how many are not mapped, and takes those out of `wanted`;
// -1: that is an error, as in a copy.
EXPORT int64_t vgpu_host_addresses(uint64_t* address, bool* wanted, uint64_t n,
                                   int write) {
  Span span = {0};
  uint64_t start = 0;
  int64_t missing = 0;
  pthread_mutex_lock(&memory_lock);
  for (uint64_t i = 0; i < n && missing >= 0; i++) {
    if (!wanted[i]) continue;
    if (address[i] - start >= span.size) {
      start = address[i];
      if (!span_of_kernel(start, write, &span)) span = (Span){0};
      if (write && span.physical) span.physical->written = true;
    }
    if (span.size) {
      address[i] = (uint64_t)span.start + (address[i] - start);
    } else if (config.strict) {
      illegal(address[i], 1, "not mapped for a kernel");
      missing = -1;
    } else {
      wanted[i] = false;
      missing++;
    }
  }
  pthread_mutex_unlock(&memory_lock);
  return missing;
}
