// The physical memory behind allocations of graphs.
#pragma once

#include "memory/memory.h"

// The pages of a graph, by their addresses. Zero at first.
typedef struct GraphPages {
  Ranges spans;
  unsigned devices;  // a bit for each that it has spans of
  struct GraphPages *next, *previous;
} GraphPages;

// All under memory_lock.

// Addresses of it, from now on, without physical memory. They are given back at the
// end.
void graph_pages_add(GraphPages* g, int device, uint64_t start, uint64_t size);
// Physical memory for all of it, of its own while a launch in the stream is under way.
CUresult graph_pages_map(GraphPages* g, const void* stream);
void graph_pages_start(GraphPages* g,
                       const void* stream);  // a launch of mapped memory
void graph_pages_done(GraphPages* g);        // with the launch
// No other graph may have its physical memory until it is released.
void graph_pages_hold(GraphPages* g, uint64_t address, uint64_t size);
void graph_pages_release(GraphPages* g, uint64_t address, uint64_t size);
void graph_pages_unmap(GraphPages* g);  // all but its own
void graph_pages_end(GraphPages* g);
