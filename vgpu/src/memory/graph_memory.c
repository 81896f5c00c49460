// Allocations and frees of graphs. A node's address is fixed when it is captured; its
// memory exists from where a launch gets to the node until it is freed.
#include "memory/graph_memory.h"

#include <stdlib.h>

#include "state/config.h"

// What no node of its own graph frees, by its address.
static Ranges unfreed;
static Ranges known;  // addresses, and which memory they are of

static GraphAllocation* unfreed_at(uint64_t address) {
  Range* r = ranges_at(&unfreed, address);
  return r && r->start == address ? r->data : NULL;
}

// A graph's addresses stay its own when a node frees them: vLLM asks about a pointer
// that its capture has freed.
const GraphAllocation* graph_allocation_at(uint64_t address) {
  Range* r = ranges_at(&known, address);
  const GraphMemory* memory = r ? r->data : NULL;
  for (size_t i = memory ? memory->allocations : 0; i > 0; i--) {
    const GraphAllocation* a = memory->allocation[i - 1];
    if (a->address <= address && address < a->address + a->size) return a;
  }
  return NULL;
}

// ---- its life

static GraphMemory* memory_of(GraphMemory** memory) {
  if (*memory) return *memory;
  *memory = calloc(1, sizeof **memory);
  if (!*memory) abort();
  (*memory)->references = 1;
  return *memory;
}

static void contents_end(GraphAllocation* a) {
  Range* r = ranges_at(&mappings, a->address);
  Mapping* m = r ? r->data : NULL;
  if (!m || m->owner != a) return;
  ranges_remove(&mappings, a->address);
  physical_give(m->physical);
  free(m);
}

static void drop(GraphMemory* memory) {
  if (--memory->references) return;
  for (size_t i = 0; i < memory->allocations; i++) {
    GraphAllocation* a = memory->allocation[i];
    contents_end(a);
    if (unfreed_at(a->address) == a) ranges_remove(&unfreed, a->address);
    free(a);
  }
  for (size_t i = 0; i < memory->freeing_streams; i++)
    for (Range* r; (r = ranges_above(&memory->freed[i].addresses, 0));)
      ranges_remove(&memory->freed[i].addresses, r->start);
  for (Range* r = ranges_above(&memory->pages.spans, 0); r;
       r = ranges_above(&memory->pages.spans, r->start))
    ranges_remove(&known, r->start);
  graph_pages_end(&memory->pages);
  free(memory->allocation);
  free(memory->freed);
  free(memory);
}

void graph_memory_drop(GraphMemory* memory) {
  if (!memory) return;
  pthread_mutex_lock(&memory_lock);
  drop(memory);
  pthread_mutex_unlock(&memory_lock);
}

// ---- nodes

static Ranges* freed_in(GraphMemory* memory, const void* stream) {
  for (size_t i = 0; i < memory->freeing_streams; i++)
    if (memory->freed[i].stream == stream) return &memory->freed[i].addresses;
  size_t n = memory->freeing_streams++;
  memory->freed = realloc(memory->freed, (n + 1) * sizeof *memory->freed);
  if (!memory->freed) abort();
  memory->freed[n].stream = stream;
  memory->freed[n].addresses = (Ranges){0};
  return &memory->freed[n].addresses;
}

// Addresses that an earlier node of the stream freed, or new ones.
static uint64_t addresses(GraphMemory* memory, int device, uint64_t size,
                          const void* stream) {
  uint64_t start = heap_take(freed_in(memory, stream), size);
  if (start != UINT64_MAX) return start;
  start = address_take(size, 0);
  if (!start) return 0;
  graph_pages_add(&memory->pages, device, start, size);
  ranges_add(&known, start, size, memory);
  return start;
}

CUresult graph_memory_add(GraphMemory** place, int device, uint64_t size,
                          const void* stream, GraphAllocation** added) {
  // PyTorch's test_graph_capture_oom meets this in the capture; what only does not fit
  // now is met by the launch.
  if (size > config.device[device].memory) return CUDA_ERROR_OUT_OF_MEMORY;
  uint64_t bytes = round_up(size, config.device[device].malloc_block);
  pthread_mutex_lock(&memory_lock);
  GraphMemory* memory = memory_of(place);
  uint64_t start = addresses(memory, device, bytes, stream);
  if (start) {
    GraphAllocation* a = calloc(1, sizeof *a);
    size_t n = memory->allocations++;
    memory->allocation = realloc(memory->allocation, (n + 1) * sizeof a);
    if (!a || !memory->allocation) abort();
    *a = (GraphAllocation){.memory = memory,
                           .address = start,
                           .size = bytes,
                           .requested = size,
                           .device = device};
    memory->allocation[n] = *added = a;
    ranges_add(&unfreed, start, bytes, a);
  }
  pthread_mutex_unlock(&memory_lock);
  return start ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult graph_memory_add_free(GraphMemory** place, uint64_t address,
                               const void* stream, GraphAllocation** own) {
  pthread_mutex_lock(&memory_lock);
  GraphAllocation* a = unfreed_at(address);
  bool right = a && !a->freed_elsewhere;
  if (right && a->memory == *place) {
    a->freed = true;
    ranges_remove(&unfreed, address);
    heap_give(freed_in(a->memory, stream), address, a->size);
    *own = a;
  } else if (right) {
    a->freed_elsewhere = true;
    memory_of(place);
    *own = NULL;
  }
  pthread_mutex_unlock(&memory_lock);
  return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// ---- instances

bool graph_memory_instantiate(GraphMemory* memory) {
  pthread_mutex_lock(&memory_lock);
  bool first = !memory->instantiated;
  if (first) memory->references++;
  memory->instantiated = true;
  pthread_mutex_unlock(&memory_lock);
  return first;
}

static void unmap_unless_used(GraphMemory* memory) {
  if (!memory->instantiated && !memory->running) graph_pages_unmap(&memory->pages);
}

void graph_memory_uninstantiate(GraphMemory* memory) {
  pthread_mutex_lock(&memory_lock);
  memory->instantiated = false;
  unmap_unless_used(memory);
  drop(memory);
  pthread_mutex_unlock(&memory_lock);
}

CUresult graph_memory_upload(GraphMemory* memory, const void* stream) {
  pthread_mutex_lock(&memory_lock);
  CUresult error =
      memory->running ? CUDA_SUCCESS : graph_pages_map(&memory->pages, stream);
  pthread_mutex_unlock(&memory_lock);
  return error;
}

static void hold(GraphAllocation* a) {
  a->launched = true;
  if (a->freed) return;
  a->held = true;
  a->holds++;
  a->memory->references++;
  graph_pages_hold(&a->memory->pages, a->address, a->size);
}

CUresult graph_memory_launch(GraphMemory* memory, const void* stream) {
  CUresult error = CUDA_SUCCESS;
  pthread_mutex_lock(&memory_lock);
  for (size_t i = 0; i < memory->allocations; i++)
    if (memory->allocation[i]->held) error = CUDA_ERROR_INVALID_VALUE;
  if (!error) error = graph_pages_map(&memory->pages, stream);
  if (!error) {
    graph_pages_start(&memory->pages, stream);
    memory->running = true;
    memory->references++;
    for (size_t i = 0; i < memory->allocations; i++) hold(memory->allocation[i]);
  }
  pthread_mutex_unlock(&memory_lock);
  return error;
}

// ---- in the order of calls

bool graph_memory_is_held(uint64_t address) {
  pthread_mutex_lock(&memory_lock);
  const GraphAllocation* a = unfreed_at(address);
  bool held = a && a->held;
  pthread_mutex_unlock(&memory_lock);
  return held;
}

GraphAllocation* graph_memory_release(const GraphMemory* memory, uint64_t address) {
  pthread_mutex_lock(&memory_lock);
  GraphAllocation* a = address ? unfreed_at(address) : NULL;
  for (size_t i = 0; !address && i < memory->allocations && !(a && a->held); i++)
    a = memory->allocation[i];
  if (a && !a->held) a = NULL;
  if (a) a->held = false;
  pthread_mutex_unlock(&memory_lock);
  return a;
}

// ---- in the order of a stream

CUresult graph_allocation_map(GraphAllocation* a) {
  pthread_mutex_lock(&memory_lock);
  contents_end(a);
  // Charged with its graph's pages.
  Physical* physical = physical_of_others(a->device, a->size);
  Mapping* m = mapping_add(a->address, a->size, physical);
  m->by = BY_GRAPH;
  m->owner = a;
  m->requested = a->requested;
  pthread_mutex_unlock(&memory_lock);
  return CUDA_SUCCESS;
}

CUresult graph_allocation_free(GraphAllocation* a) {
  GraphMemory* memory = a->memory;
  pthread_mutex_lock(&memory_lock);
  contents_end(a);
  if (!a->freed) {
    if (!--a->holds) {
      graph_pages_release(&memory->pages, a->address, a->size);
      unmap_unless_used(memory);
    }
    drop(memory);
  }
  pthread_mutex_unlock(&memory_lock);
  return CUDA_SUCCESS;
}

// PyTorch's test_graph_cudnn_dropout frees its captured memory, and never launches it.
CUresult graph_memory_free(uint64_t address) {
  GraphAllocation* held = graph_memory_release(NULL, address);
  if (held) return graph_allocation_free(held);
  pthread_mutex_lock(&memory_lock);
  const GraphAllocation* a = unfreed_at(address);
  bool right = a && !a->launched;
  pthread_mutex_unlock(&memory_lock);
  return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult graph_memory_done(GraphMemory* memory) {
  pthread_mutex_lock(&memory_lock);
  graph_pages_done(&memory->pages);
  memory->running = false;
  unmap_unless_used(memory);
  drop(memory);
  pthread_mutex_unlock(&memory_lock);
  return CUDA_SUCCESS;
}
