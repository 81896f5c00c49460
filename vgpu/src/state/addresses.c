// The device addresses of this process, and which of them are free.
#include "state/addresses.h"

#include <sys/mman.h>

#include "state/base.h"

pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t address_start, address_bytes;
static Ranges address_heap;

void* map_host(uint64_t bytes, int protection, bool shared) {
  int how = (shared ? MAP_SHARED : MAP_PRIVATE) | MAP_ANONYMOUS | MAP_NORESERVE;
  void* start = mmap(NULL, bytes, protection, how, -1, 0);
  if (start == MAP_FAILED) return NULL;
  madvise(start, bytes, MADV_DONTFORK);
  madvise(start, bytes, MADV_DONTDUMP);
  return start;
}

bool addresses_init(void) {
  void* start = NULL;
  for (address_bytes = ADDRESS_BYTES; !start && address_bytes >> 32;) {
    start = map_host(address_bytes, PROT_NONE, false);
    if (!start) address_bytes /= 2;
  }
  if (!start) {
    message("no address space for a device: raise the limit (ulimit -v)");
    return false;
  }
  const uint64_t align = 2ull << 20;
  address_start = ((uint64_t)start + align) / align * align;
  address_bytes = (address_bytes - align) / align * align;
  address_heap = (Ranges){0};  // a forked child has none of its parent's
  heap_give(&address_heap, address_start, address_bytes);
  return true;
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
