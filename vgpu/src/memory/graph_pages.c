// The physical memory behind allocations of graphs. CUDA programming guide, "Graph
// memory nodes": a launch maps it; graphs that cannot run at the same time share it; it
// stays reserved when allocations are freed and graphs destroyed, until it is trimmed.
#include "memory/graph_pages.h"

#include <stdlib.h>

#include "state/account.h"
#include "state/context.h"

typedef struct {
  int mapped;                // by so many graphs
  int running;               // launches that are under way
  const void* stream;        // where they are
  const GraphPages* holder;  // has an allocation here that is not freed
  uint64_t chosen;           // by the mapping of this number
  bool trimmed;
} Page;

typedef struct {
  int device;
  uint64_t pages;
  Page** page;  // NULL: not mapped
} Span;

typedef struct {
  Page** page;
  uint64_t pages, room;
  uint64_t used, used_high, reserved_high;  // in pages; used: some graph maps it
} Pool;

static Pool pools[MAX_DEVICES];
static GraphPages* graphs;
static uint64_t choices;

static uint64_t page_bytes(int device) { return config.device[device].malloc_block; }

#define EACH_SPAN(g, r)                                 \
  for (Range* r = ranges_above(&(g)->spans, 0); r != 0; \
       r = ranges_above(&(g)->spans, r->start))

void graph_pages_add(GraphPages* g, int device, uint64_t start, uint64_t size) {
  if (!g->devices) {
    g->next = graphs;
    if (graphs) graphs->previous = g;
    graphs = g;
  }
  g->devices |= 1u << device;
  Span* span = calloc(1, sizeof *span);
  if (!span) abort();
  *span = (Span){.device = device, .pages = size / page_bytes(device)};
  span->page = calloc(span->pages, sizeof *span->page);
  if (!span->page) abort();
  ranges_add(&g->spans, start, size, span);
}

static void map(Pool* pool, Page** slot, Page* page) {
  *slot = page;
  if (!page->mapped++) pool->used++;
  pool->used_high = MAX(pool->used_high, pool->used);
}

static void unmap(Pool* pool, Page** slot) {
  Page* page = *slot;
  *slot = NULL;
  if (page && !--page->mapped) pool->used--;
}

// Launches in one stream follow one another, so that they can share.
static bool usable(const Page* page, const GraphPages* g, const void* stream) {
  return (!page->holder || page->holder == g) &&
         (!page->running || page->stream == stream);
}

static bool grow(int device, uint64_t pages) {
  Pool* pool = &pools[device];
  if (!charge(device, (int64_t)(pages * page_bytes(device)), "graph memory"))
    return false;
  if (pool->pages + pages > pool->room) {
    pool->room = MAX(pool->room * 2, pool->pages + pages);
    pool->page = realloc(pool->page, pool->room * sizeof *pool->page);
    if (!pool->page) abort();
  }
  for (uint64_t i = 0; i < pages; i++)
    if (!(pool->page[pool->pages++] = calloc(1, sizeof(Page)))) abort();
  pool->reserved_high = MAX(pool->reserved_high, pool->pages);
  return true;
}

static CUresult map_on(GraphPages* g, int device, const void* stream) {
  Pool* pool = &pools[device];
  uint64_t choice = ++choices, missing = 0, spare = 0, next = 0;
  EACH_SPAN(g, r) {
    Span* span = r->data;
    for (uint64_t i = 0; span->device == device && i < span->pages; i++) {
      Page* page = span->page[i];
      if (page && usable(page, g, stream)) {
        page->chosen = choice;
      } else {
        unmap(pool, &span->page[i]);
        missing++;
      }
    }
  }
  if (!missing) return CUDA_SUCCESS;
  for (uint64_t i = 0; i < pool->pages; i++)
    spare += pool->page[i]->chosen != choice && usable(pool->page[i], g, stream);
  if (missing > spare && !grow(device, missing - spare))
    return CUDA_ERROR_OUT_OF_MEMORY;
  EACH_SPAN(g, r) {
    Span* span = r->data;
    for (uint64_t i = 0; span->device == device && i < span->pages; i++) {
      if (span->page[i]) continue;
      while (pool->page[next]->chosen == choice || !usable(pool->page[next], g, stream))
        next++;
      pool->page[next]->chosen = choice;
      map(pool, &span->page[i], pool->page[next]);
    }
  }
  return CUDA_SUCCESS;
}

CUresult graph_pages_map(GraphPages* g, const void* stream) {
  CUresult error = CUDA_SUCCESS;
  for (int device = 0; device < MAX_DEVICES && !error; device++)
    if (g->devices & 1u << device) error = map_on(g, device, stream);
  return error;
}

void graph_pages_start(GraphPages* g, const void* stream) {
  EACH_SPAN(g, r) {
    Span* span = r->data;
    for (uint64_t i = 0; i < span->pages; i++) {
      span->page[i]->running++;
      span->page[i]->stream = stream;
    }
  }
}

void graph_pages_done(GraphPages* g) {
  EACH_SPAN(g, r) {
    Span* span = r->data;
    for (uint64_t i = 0; i < span->pages; i++) span->page[i]->running--;
  }
}

static void set_holder(GraphPages* g, uint64_t address, uint64_t size,
                       const GraphPages* holder) {
  for (uint64_t at = address; at < address + size;) {
    Range* r = ranges_at(&g->spans, at);
    Span* span = r->data;
    uint64_t bytes = page_bytes(span->device);
    for (uint64_t i = (at - r->start) / bytes; i < span->pages && at < address + size;
         i++, at += bytes)
      if (span->page[i]) span->page[i]->holder = holder;
  }
}

void graph_pages_hold(GraphPages* g, uint64_t address, uint64_t size) {
  set_holder(g, address, size, g);
}

void graph_pages_release(GraphPages* g, uint64_t address, uint64_t size) {
  set_holder(g, address, size, NULL);
}

void graph_pages_unmap(GraphPages* g) {
  EACH_SPAN(g, r) {
    Span* span = r->data;
    for (uint64_t i = 0; i < span->pages; i++)
      if (span->page[i] && span->page[i]->holder != g)
        unmap(&pools[span->device], &span->page[i]);
  }
}

void graph_pages_end(GraphPages* g) {
  graph_pages_unmap(g);
  for (Range* r; (r = ranges_above(&g->spans, 0));) {
    Span* span = r->data;
    address_give(r->start, r->size);
    free(span->page);
    free(span);
    ranges_remove(&g->spans, r->start);
  }
  if (!g->devices) return;
  *(g->previous ? &g->previous->next : &graphs) = g->next;
  if (g->next) g->next->previous = g->previous;
}

// ---- the calls

static void trim(int device) {
  Pool* pool = &pools[device];
  for (uint64_t i = 0; i < pool->pages; i++)
    pool->page[i]->trimmed = !pool->page[i]->holder && !pool->page[i]->running;
  for (GraphPages* g = graphs; g; g = g->next) {
    EACH_SPAN(g, r) {
      Span* span = r->data;
      for (uint64_t i = 0; span->device == device && i < span->pages; i++)
        if (span->page[i] && span->page[i]->trimmed) unmap(pool, &span->page[i]);
    }
  }
  uint64_t kept = 0;
  for (uint64_t i = 0; i < pool->pages; i++) {
    if (pool->page[i]->trimmed)
      free(pool->page[i]);
    else
      pool->page[kept++] = pool->page[i];
  }
  uint64_t given = pool->pages - kept;
  pool->pages = kept;
  charge(device, -(int64_t)(given * page_bytes(device)), "graph memory");
}

EXPORT CUresult cuDeviceGraphMemTrim(CUdevice ordinal) {
  DRV_USE(0);
  if (!is_ordinal(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  pthread_mutex_lock(&memory_lock);
  trim(device_index(ordinal));
  pthread_mutex_unlock(&memory_lock);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetGraphMemAttribute(CUdevice ordinal,
                                             CUgraphMem_attribute attribute,
                                             void* value) {
  DRV_USE(0);
  if (!is_ordinal(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  int device = device_index(ordinal);
  const Pool* pool = &pools[device];
  const uint64_t* pages[] = {
      [CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT] = &pool->used,
      [CU_GRAPH_MEM_ATTR_USED_MEM_HIGH] = &pool->used_high,
      [CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT] = &pool->pages,
      [CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH] = &pool->reserved_high,
  };
  if ((unsigned)attribute >= sizeof pages / sizeof *pages || !value)
    return CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&memory_lock);
  *(uint64_t*)value = *pages[attribute] * page_bytes(device);
  pthread_mutex_unlock(&memory_lock);
  return CUDA_SUCCESS;
}

// A high watermark can only be reset, which is to what there is now.
EXPORT CUresult cuDeviceSetGraphMemAttribute(CUdevice ordinal,
                                             CUgraphMem_attribute attribute,
                                             void* value) {
  DRV_USE(0);
  if (!is_ordinal(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  Pool* pool = &pools[device_index(ordinal)];
  bool of_use = attribute == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH;
  if ((!of_use && attribute != CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH) || !value ||
      *(uint64_t*)value)
    return CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&memory_lock);
  if (of_use)
    pool->used_high = pool->used;
  else
    pool->reserved_high = pool->pages;
  pthread_mutex_unlock(&memory_lock);
  return CUDA_SUCCESS;
}

// The attributes have the driver's numbers.
EXPORT cudaError_t cudaDeviceGraphMemTrim(int ordinal) {
  RT_ENTER(0);
  RT(cuDeviceGraphMemTrim(ordinal));
}

EXPORT cudaError_t cudaDeviceGetGraphMemAttribute(
    int ordinal, enum cudaGraphMemAttributeType attribute, void* value) {
  RT_ENTER(0);
  RT(cuDeviceGetGraphMemAttribute(ordinal, (CUgraphMem_attribute)attribute, value));
}

EXPORT cudaError_t cudaDeviceSetGraphMemAttribute(
    int ordinal, enum cudaGraphMemAttributeType attribute, void* value) {
  RT_ENTER(0);
  RT(cuDeviceSetGraphMemAttribute(ordinal, (CUgraphMem_attribute)attribute, value));
}
