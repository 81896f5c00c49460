// Device memory and what it is mapped to; pinned host memory.
#pragma once

#include <cuda.h>

#include "state/addresses.h"

enum { PAGE = 4096 };  // of the host

static inline uint64_t round_up(uint64_t n, uint64_t to) {
  return (n + to - 1) / to * to;
}

// ---- physical.c

typedef struct {
  int device;
  uint64_t size, offset;  // in the device's physical memory
  int references;
  uint64_t handle;  // of cuMemCreate
  int held;         // times the program holds the handle
  bool written;     // false: every byte is zero
  const char* cause;
  CUmemAllocationProp properties;
} Physical;

typedef struct {
  Physical* physical;
  uint64_t offset;  // in the physical memory
  bool readable, writable;
  enum { BY_MALLOC, BY_POOL, BY_MAP } by;
  uint64_t requested;
  void* owner;  // the pool, or what small blocks share
} Mapping;

extern Ranges mappings;  // device addresses that are backed
extern Ranges reserved;  // device addresses handed out

Physical* physical_take(int device, uint64_t size, const char* cause);
void physical_give(Physical* physical);  // one reference less
char* physical_start(const Physical* physical);
Mapping* mapping_add(uint64_t address, uint64_t size, Physical* physical);

// ---- malloc.c

// Under memory_lock: a block of its own, mapped.
CUresult block_take(int device, uint64_t size, const char* cause, uint64_t* address);
CUresult memory_allocate(int device, uint64_t size, const char* cause,
                         uint64_t* address);
CUresult memory_free(uint64_t address);

// ---- contents.c

CUresult memory_copy(uint64_t to, uint64_t from, uint64_t size);
CUresult memory_fill(uint64_t to, uint64_t value, int value_bytes, uint64_t n);
bool memory_is_zero(uint64_t from, uint64_t size);  // false: it may be, or not

// ---- host.c

typedef struct {
  uint64_t size;
  int device;
  enum { PINNED, REGISTERED, MANAGED } kind;
  bool charged;
} HostBlock;

extern Ranges host_blocks;
