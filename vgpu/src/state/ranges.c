// Address ranges in a treap: a search tree by start, a heap by random weight.
#include "state/ranges.h"

#include <stdlib.h>

#include "state/base.h"

static uint32_t random_weight(void) {
  static __thread uint32_t x = 2463534242u;
  x ^= x << 13;
  x ^= x >> 17;
  x ^= x << 5;
  return x;
}

static void update(Range* r) {
  r->largest = r->size;
  if (r->left) r->largest = MAX(r->largest, r->left->largest);
  if (r->right) r->largest = MAX(r->largest, r->right->largest);
}

// Splits into starts below `at` and the rest.
static void split(Range* r, uint64_t at, Range** below, Range** rest) {
  if (!r) {
    *below = *rest = NULL;
  } else if (r->start < at) {
    split(r->right, at, &r->right, rest);
    *below = r;
    update(r);
  } else {
    split(r->left, at, below, &r->left);
    *rest = r;
    update(r);
  }
}

static Range* join(Range* low, Range* high) {
  if (!low) return high;
  if (!high) return low;
  if (low->weight > high->weight) {
    low->right = join(low->right, high);
    update(low);
    return low;
  }
  high->left = join(low, high->left);
  update(high);
  return high;
}

void ranges_add(Ranges* ranges, uint64_t start, uint64_t size, void* data) {
  Range* r = malloc(sizeof *r);
  if (!r) abort();
  *r = (Range){.start = start, .size = size, .data = data, .weight = random_weight()};
  update(r);
  Range *below, *rest;
  split(ranges->root, start, &below, &rest);
  ranges->root = join(join(below, r), rest);
  ranges->count++;
}

void* ranges_remove(Ranges* ranges, uint64_t start) {
  Range *below, *here, *rest;
  split(ranges->root, start, &below, &rest);
  split(rest, start + 1, &here, &rest);
  ranges->root = join(below, rest);
  if (!here) return NULL;
  void* data = here->data;
  free(here);
  ranges->count--;
  return data;
}

Range* ranges_below(const Ranges* ranges, uint64_t address) {
  Range* best = NULL;
  for (Range* r = ranges->root; r;) {
    if (r->start <= address) {
      best = r;
      r = r->right;
    } else {
      r = r->left;
    }
  }
  return best;
}

Range* ranges_above(const Ranges* ranges, uint64_t address) {
  Range* best = NULL;
  for (Range* r = ranges->root; r;) {
    if (r->start > address) {
      best = r;
      r = r->left;
    } else {
      r = r->right;
    }
  }
  return best;
}

Range* ranges_at(const Ranges* ranges, uint64_t address) {
  Range* r = ranges_below(ranges, address);
  return r && address - r->start < r->size ? r : NULL;
}

bool ranges_overlap(const Ranges* ranges, uint64_t start, uint64_t size) {
  Range* r = ranges_below(ranges, start + size - 1);
  return r && r->start + r->size > start;
}

uint64_t heap_take(Ranges* heap, uint64_t size) {
  Range* r = heap->root;
  if (!r || r->largest < size) return UINT64_MAX;
  for (;;) {
    if (r->left && r->left->largest >= size) {
      r = r->left;
    } else if (r->size >= size) {
      break;
    } else {
      r = r->right;
    }
  }
  uint64_t start = r->start, rest = r->size - size;
  ranges_remove(heap, start);
  if (rest) ranges_add(heap, start + size, rest, NULL);
  return start;
}

uint64_t heap_take_aligned(Ranges* heap, uint64_t size, uint64_t alignment) {
  uint64_t start = heap_take(heap, size + alignment);
  if (start == UINT64_MAX) return start;
  uint64_t aligned = (start + alignment - 1) / alignment * alignment;
  uint64_t end = start + size + alignment;
  if (aligned > start) heap_give(heap, start, aligned - start);
  if (end > aligned + size) heap_give(heap, aligned + size, end - aligned - size);
  return aligned;
}

void heap_give(Ranges* heap, uint64_t start, uint64_t size) {
  Range* low = start ? ranges_below(heap, start - 1) : NULL;
  Range* high = ranges_at(heap, start + size);
  if (high) {
    uint64_t more = high->size;
    ranges_remove(heap, start + size);
    size += more;
  }
  if (low && low->start + low->size == start) {
    uint64_t first = low->start;
    size += low->size;
    ranges_remove(heap, first);
    start = first;
  }
  ranges_add(heap, start, size, NULL);
}
