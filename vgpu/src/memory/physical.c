// Physical memory, and the addresses that map to it.
//
// Physical memory is one lazily zeroed host mapping a device; device addresses
// are a separate range no one can touch. A copy looks its addresses up, so
// unmapping is exact and costs no system call.
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "memory/memory.h"
#include "state/account.h"

// First fit needs at most log2(largest / smallest) times the live bytes.
enum { PHYSICAL_FACTOR = 32 };

Ranges mappings, reserved;

static struct {
  char* start;
  Ranges heap;
} physical_memory[MAX_DEVICES];

static bool physical_init(int device) {
  if (physical_memory[device].start) return true;
  uint64_t memory = MAX(config.device[device].memory, 1u << 20);
  for (uint64_t factor = PHYSICAL_FACTOR; factor; factor /= 2) {
    bool unified = config.device[device].integrated;
    char* start = map_host(memory * factor, PROT_READ | PROT_WRITE, unified);
    if (!start) continue;
    physical_memory[device].start = start;
    heap_give(&physical_memory[device].heap, 0, memory * factor);
    return true;
  }
  message(
      "no host address space for device %d: needed %lu bytes; raise the "
      "limit (ulimit -v) or allow overcommit (vm.overcommit_memory)",
      device, memory);
  return false;
}

static Physical* physical_new(int device, uint64_t size, const char* cause) {
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

Physical* physical_take(int device, uint64_t size, const char* cause) {
  if (!physical_init(device)) return NULL;
  if (!charge(device, (int64_t)size, cause)) return NULL;
  return physical_new(device, size, cause);
}

Physical* physical_of_others(int device, uint64_t size) {
  if (!physical_init(device)) abort();
  return physical_new(device, size, NULL);
}

char* physical_start(const Physical* p) {
  return physical_memory[p->device].start + p->offset;
}

void physical_zero(const Physical* p, char* from, uint64_t size) {
  bool file = p->shared || config.device[p->device].integrated;
  madvise(from, size, file ? MADV_REMOVE : MADV_DONTNEED);
}

// -1: no file, but zero.
static bool map_again(const Physical* p, int file) {
  char* start = physical_start(p);
  bool shared = file >= 0 || config.device[p->device].integrated;
  int how = MAP_FIXED | MAP_NORESERVE | (shared ? MAP_SHARED : MAP_PRIVATE) |
            (file < 0 ? MAP_ANONYMOUS : 0);
  if (mmap(start, p->size, PROT_READ | PROT_WRITE, how, file, 0) == MAP_FAILED)
    return false;
  madvise(start, p->size, MADV_DONTFORK);
  madvise(start, p->size, MADV_DONTDUMP);
  return true;
}

bool physical_open(Physical* p, int file) {
  if ((uint64_t)physical_start(p) % PAGE || p->size % PAGE) return false;
  if (!map_again(p, file)) return false;
  p->shared = p->written = true;
  p->file = file;
  return true;
}

bool physical_share(Physical* p) {
  if (p->shared) return true;
  int file = memfd_create("vgpu", MFD_CLOEXEC);
  if (file < 0) return false;
  bool whole = !ftruncate(file, (off_t)p->size);
  for (uint64_t done = 0; whole && p->written && done < p->size;) {
    ssize_t n = pwrite(file, physical_start(p) + done, p->size - done, (off_t)done);
    whole = n > 0;
    if (whole) done += (uint64_t)n;
  }
  if (whole && physical_open(p, file)) return true;
  close(file);
  return false;
}

static void forget(Physical* p) {
  if (!p->written) return;
  char* start = physical_start(p);
  if (p->shared) {  // what other processes opened stays
    close(p->file);
    if (!map_again(p, -1)) abort();
    p->shared = p->written = false;
    return;
  }
  char* from = (char*)(((uint64_t)start + PAGE - 1) & ~(uint64_t)(PAGE - 1));
  char* to = (char*)((uint64_t)(start + p->size) & ~(uint64_t)(PAGE - 1));
  if (to <= from) {
    memset(start, 0, p->size);
  } else {
    physical_zero(p, from, to - from);
    memset(start, 0, from - start);
    memset(to, 0, start + p->size - to);
  }
  p->written = false;
}

void physical_give(Physical* p) {
  if (--p->references) return;
  forget(p);
  heap_give(&physical_memory[p->device].heap, p->offset, p->size);
  if (p->cause) charge(p->device, -(int64_t)p->size, p->cause);
  free(p);
}

Mapping* mapping_add(uint64_t address, uint64_t size, Physical* physical) {
  Mapping* m = calloc(1, sizeof *m);
  if (!m) abort();
  m->physical = physical;
  m->readable = m->writable = true;
  ranges_add(&mappings, address, size, m);
  return m;
}
