// Address ranges in a balanced tree, every operation O(log n).
#pragma once

#include <stdbool.h>
#include <stdint.h>

typedef struct Range {
  uint64_t start, size;
  void* data;
  uint64_t largest;  // size of the largest range below this node
  uint32_t weight;
  struct Range *left, *right;
} Range;

typedef struct {
  Range* root;
  uint64_t count;
} Ranges;

void ranges_add(Ranges* ranges, uint64_t start, uint64_t size, void* data);
void* ranges_remove(Ranges* ranges, uint64_t start);
Range* ranges_at(const Ranges* ranges, uint64_t address);     // containing it
Range* ranges_below(const Ranges* ranges, uint64_t address);  // start <= it
Range* ranges_above(const Ranges* ranges, uint64_t address);  // start > it
bool ranges_overlap(const Ranges* ranges, uint64_t start, uint64_t size);

// A heap is a set of free ranges; taking is first fit, giving back merges.
uint64_t heap_take(Ranges* heap, uint64_t size);  // UINT64_MAX: none fits
uint64_t heap_take_aligned(Ranges* heap, uint64_t size, uint64_t alignment);
void heap_give(Ranges* heap, uint64_t start, uint64_t size);
