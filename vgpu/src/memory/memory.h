// Device memory and its mappings; pinned host memory.
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
  bool multicast;
  bool shared;  // its contents are those of `file`, with other processes
  int file;
  const char* cause;  // NULL: charged to others, or a multicast object
  CUmemAllocationProp properties;
} Physical;

typedef struct {
  Physical* physical;
  uint64_t offset;  // in the physical memory
  bool readable, writable;
  enum { BY_MALLOC, BY_POOL, BY_MAP, BY_GRAPH, BY_HANDLE } by;
  bool freed;  // once its stream gets there
  uint64_t requested;
  void* owner;  // the pool, the page of small blocks, a graph's memory, or a handle's
} Mapping;

extern Ranges mappings;  // device addresses that are backed
extern Ranges reserved;  // device addresses handed out

Physical* physical_take(int device, uint64_t size, const char* cause);
// As of another process, which is charged for it.
Physical* physical_of_others(int device, uint64_t size);
void physical_give(Physical* physical);  // one reference less
char* physical_start(const Physical* physical);
bool physical_share(Physical* physical);  // puts its contents into a file
// Its contents are those of a file from now on. False: they stay, as does the file.
bool physical_open(Physical* physical, int file);
// Whole pages of it, by giving them back to the host.
void physical_zero(const Physical* physical, char* from, uint64_t size);
Mapping* mapping_add(uint64_t address, uint64_t size, Physical* physical);

// ---- virtual.c: under memory_lock

uint64_t handle_add(Physical* physical, const CUmemAllocationProp* properties);
Physical* handle_find(CUmemGenericAllocationHandle handle);  // NULL: it is none

// ---- malloc.c

// Under memory_lock: a block of its own, mapped.
CUresult block_take(int device, uint64_t size, const char* cause, uint64_t* address);
CUresult memory_allocate(int device, uint64_t size, const char* cause,
                         uint64_t* address);
CUresult memory_free(uint64_t address);

// ---- pool.c

CUmemoryPool pool_of(int ordinal);  // the device's default pool
int pool_device(CUmemoryPool pool);
CUresult pool_allocate(CUmemoryPool pool, uint64_t size, uint64_t* address);
// True: it is a pool's, and was not freed before; memory_free_either is to follow.
bool pool_free_later(uint64_t address);
CUresult memory_free_either(uint64_t address);  // a pool's, a graph's, or cudaMalloc's

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

CUresult host_free(void* address);  // no registered memory
