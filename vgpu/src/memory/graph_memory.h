// What graphs allocate and free.
#pragma once

#include "memory/graph_pages.h"

// What one node allocates.
typedef struct {
  struct GraphMemory* memory;
  uint64_t address, size, requested;
  int device;
  bool freed;            // by a node of its own graph
  bool freed_elsewhere;  // by a node of another graph
  bool launched;
  bool held;  // launched and not freed since, in the order of calls
  int holds;  // the same, but until streams get there
} GraphAllocation;

// Of a graph and its instance: addresses stay the same.
typedef struct GraphMemory {
  GraphPages pages;
  int references;  // the graph, its instance, allocations held, the launch under way
  bool instantiated, running;
  GraphAllocation** allocation;
  size_t allocations;
  struct {
    const void* stream;
    Ranges addresses;
  }* freed;  // by nodes, for later nodes of the same stream
  size_t freeing_streams;
} GraphMemory;

// ---- nodes; *memory is made with the first

CUresult graph_memory_add(GraphMemory** memory, int device, uint64_t size,
                          const void* stream, GraphAllocation** added);
// *own is NULL if another graph allocates it.
CUresult graph_memory_add_free(GraphMemory** memory, uint64_t address,
                               const void* stream, GraphAllocation** own);
void graph_memory_drop(GraphMemory* memory);  // its graph has ended

// ---- instances

bool graph_memory_instantiate(GraphMemory* memory);  // false: it has one
void graph_memory_uninstantiate(GraphMemory* memory);
CUresult graph_memory_upload(GraphMemory* memory, const void* stream);
// To be followed by the work of the nodes, and graph_memory_done.
CUresult graph_memory_launch(GraphMemory* memory, const void* stream);

// ---- in the order of calls

bool graph_memory_is_held(uint64_t address);
// What is held at an address, or (0) some that the memory holds: it no longer is, and
// graph_allocation_free is to follow. NULL: none.
GraphAllocation* graph_memory_release(const GraphMemory* memory, uint64_t address);

// Of either, at once; what no launch allocated yet may be freed, too.
CUresult graph_memory_free(uint64_t address);

// ---- in the order of a stream

CUresult graph_allocation_map(GraphAllocation* allocation);
CUresult graph_allocation_free(GraphAllocation* allocation);
CUresult graph_memory_done(GraphMemory* memory);

// ---- anywhere; under memory_lock

// What a node last allocated there, launched and freed or not; NULL: nothing.
const GraphAllocation* graph_allocation_at(uint64_t address);
