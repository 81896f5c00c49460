// Streams that are behind: with `streams_behind`, a stream's work is done when somebody
// waits for it, or asks for it often enough, or after a set time. Off, all of it is
// done at once. The order is that of the stream's own work, after the work that it
// waits for, so that a run is the same each time.
#include <stdlib.h>
#include <time.h>

#include "memory/memory.h"
#include "state/context.h"
#include "state/objects.h"
#include "state/state.h"
#include "streams/stream.h"

typedef struct Work {
  Operation operation;
  uint64_t number, posted_at;
  Stream* after;  // a wait for this stream's work up to `upto`
  uint64_t upto;
  struct Work* next;
} Work;

static Stream default_stream[MAX_DEVICES];
static uint64_t next_number = 1;
// Held while work is done; a host function may not call CUDA.
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

static uint64_t now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

static Stream* queue_of(Stream* stream) {
  if (stream) return stream;
  Stream* own = &default_stream[current_device()];
  own->ordinal = current_ordinal();
  return own;
}

static bool is_default(const Stream* stream) {
  return stream >= default_stream && stream < default_stream + MAX_DEVICES;
}

static bool exists(const Stream* stream) {
  return is_default(stream) || object_is(stream, STREAM);
}

CUresult operation_do(const Operation* o) {
  switch (o->kind) {
    case NODE_COPY:
      return memory_copy(o->to, o->from, o->size);
    case NODE_FILL:
      return memory_fill(o->to, o->value, o->value_bytes, o->size);
    case NODE_HOST:
      o->function(o->argument);
      return CUDA_SUCCESS;
    case NODE_COLLECTIVE:
      return o->call(o->argument);
    case NODE_ALLOCATE:
      return graph_allocation_map(o->argument);
    case NODE_FREE:
      return o->argument ? graph_allocation_free(o->argument)
                         : memory_free_either(o->to);
    case NODE_DONE:
      return graph_memory_done(o->argument);
    case NODE_KERNEL:
      if (self) __atomic_fetch_add(&self->kernels, 1, __ATOMIC_RELAXED);
      if (self && o->call) __atomic_fetch_add(&self->computed, 1, __ATOMIC_RELAXED);
      return o->call ? o->call(o->argument) : CUDA_SUCCESS;
    default:
      return CUDA_SUCCESS;
  }
}

// A copy from or to memory that is not pinned is done before the call returns.
static bool is_pageable(uint64_t address) {
  if (is_device_address(address)) return false;
  pthread_mutex_lock(&memory_lock);
  bool pageable = !ranges_at(&host_blocks, address);
  pthread_mutex_unlock(&memory_lock);
  return pageable;
}

static void add(Stream* stream, Work work) {
  Work* own = malloc(sizeof *own);
  if (!own) abort();
  *own = work;
  own->number = next_number++;
  own->posted_at = config.behind_us ? now_us() : 0;
  stream->given = own->number;
  *(stream->last_work ? &stream->last_work->next : &stream->work) = own;
  stream->last_work = own;
}

static CUresult work_do(const Operation* o) {
  if (o->kind != NODE_COPY || !(is_pageable(o->to) || is_pageable(o->from)))
    return operation_do(o);
  message("a copy of %lu bytes was not done when its pinned memory was given back",
          o->size);
  sticky_error(CUDA_ERROR_ILLEGAL_ADDRESS);
  return CUDA_ERROR_ILLEGAL_ADDRESS;
}

// With the lock held. Does a stream's work up to a number.
static CUresult finish(Stream* stream, uint64_t upto) {
  CUresult error = CUDA_SUCCESS;
  while (stream->work && stream->work->number <= upto) {
    Work* work = stream->work;
    stream->work = work->next;
    if (!stream->work) stream->last_work = NULL;
    CUresult failed = CUDA_SUCCESS;
    if (!work->after)
      failed = work_do(&work->operation);
    else if (exists(work->after))
      failed = finish(work->after, work->upto);
    if (!error) error = failed;
    free(work);
  }
  return error;
}

static void wait_after(Stream* stream, Stream* other, uint64_t upto) {
  if (other != stream && other->work && other->work->number <= upto)
    add(stream, (Work){.after = other, .upto = upto});
}

static void wait_for_blocking(void* object, void* data) {
  Stream *other = object, *stream = data;
  if (other->ordinal == stream->ordinal && !(other->flags & CU_STREAM_NON_BLOCKING))
    wait_after(stream, other, other->given);
}

CUresult operation_post(Stream* given, const Operation* o) {
  if (!config.streams_behind) return operation_do(o);
  bool now =
      o->call || (o->kind == NODE_COPY && (is_pageable(o->to) || is_pageable(o->from)));
  CUresult error = CUDA_SUCCESS;
  pthread_mutex_lock(&lock);
  Stream* stream = queue_of(given);
  Stream* legacy = &default_stream[device_index(stream->ordinal)];
  if (stream == legacy) {
    pthread_mutex_lock(&objects_lock);
    objects_each(STREAM, wait_for_blocking, stream);
    pthread_mutex_unlock(&objects_lock);
  } else if (!(stream->flags & CU_STREAM_NON_BLOCKING)) {
    wait_after(stream, legacy, legacy->given);
  }
  now |= o->kind == NODE_FREE && !stream->work;
  if (now)
    error = finish(stream, UINT64_MAX);
  else
    add(stream, (Work){.operation = *o});
  if (o->kind == NODE_FREE && !now) stream->freed = stream->given;
  pthread_mutex_unlock(&lock);
  // Not under the lock: a collective waits for its peers, what computes for Python.
  return error || !now ? error : operation_do(o);
}

Mark stream_mark(Stream* given) {
  if (!config.streams_behind) return (Mark){0};
  pthread_mutex_lock(&lock);
  operation_post(given, &(Operation){.kind = NODE_EVENT});
  Stream* stream = queue_of(given);
  Mark mark = {stream, stream->given};
  pthread_mutex_unlock(&lock);
  return mark;
}

void stream_wait_for(Stream* given, const Mark* mark) {
  if (!mark->stream) return;
  pthread_mutex_lock(&lock);
  if (exists(mark->stream)) wait_after(queue_of(given), mark->stream, mark->number);
  pthread_mutex_unlock(&lock);
}

CUresult mark_finish(const Mark* mark) {
  if (!mark->stream) return CUDA_SUCCESS;
  pthread_mutex_lock(&lock);
  CUresult error =
      exists(mark->stream) ? finish(mark->stream, mark->number) : CUDA_SUCCESS;
  pthread_mutex_unlock(&lock);
  return error;
}

static bool is_before(const Stream* stream, uint64_t number) {
  return stream->work && stream->work->number <= number;
}

bool mark_is_reached(const Mark* mark) {
  if (!mark->stream) return true;
  Stream* stream = mark->stream;
  pthread_mutex_lock(&lock);
  bool waits = exists(stream) && is_before(stream, mark->number);
  if (waits && config.behind_queries && ++stream->queries >= config.behind_queries)
    finish(stream, mark->number);
  while (waits && config.behind_us && is_before(stream, mark->number) &&
         now_us() - stream->work->posted_at >= config.behind_us)
    finish(stream, stream->work->number);
  waits = waits && is_before(stream, mark->number);
  if (!waits && exists(stream)) stream->queries = 0;
  pthread_mutex_unlock(&lock);
  return !waits;
}

Mark stream_all(Stream* stream) {
  return (Mark){config.streams_behind ? queue_of(stream) : NULL, UINT64_MAX};
}

CUresult stream_finish(Stream* stream) {
  if (!config.streams_behind) return CUDA_SUCCESS;
  Mark mark = stream ? stream_all(stream) : stream_mark(NULL);
  return mark_finish(&mark);
}

CUresult stream_finish_frees(Stream* given) {
  if (!config.streams_behind) return CUDA_SUCCESS;
  pthread_mutex_lock(&lock);
  Stream* stream = queue_of(given);
  CUresult error = finish(stream, stream->freed);
  pthread_mutex_unlock(&lock);
  return error;
}

typedef struct {
  int ordinal;
  size_t n, room;
  Stream** stream;
} Found;

static void find(void* object, void* data) {
  Stream* stream = object;
  Found* found = data;
  if (stream->ordinal != found->ordinal || !stream->work) return;
  if (found->n == found->room) {
    found->room = found->room * 2 + 8;
    found->stream = realloc(found->stream, found->room * sizeof *found->stream);
    if (!found->stream) abort();
  }
  found->stream[found->n++] = stream;
}

CUresult device_finish(void) {
  if (!config.streams_behind) return CUDA_SUCCESS;
  Found found = {.ordinal = current_ordinal()};
  pthread_mutex_lock(&lock);
  find(queue_of(NULL), &found);
  pthread_mutex_lock(&objects_lock);
  objects_each(STREAM, find, &found);
  pthread_mutex_unlock(&objects_lock);
  CUresult error = CUDA_SUCCESS;
  for (size_t i = 0; i < found.n; i++) {
    CUresult failed =
        exists(found.stream[i]) ? finish(found.stream[i], UINT64_MAX) : CUDA_SUCCESS;
    if (!error) error = failed;
  }
  pthread_mutex_unlock(&lock);
  free(found.stream);
  return error;
}

// For a test: this stream is ahead of the others.
EXPORT int vgpu_finish(void* handle) {
  if ((uintptr_t)handle > 2 && !object_is(handle, STREAM)) return 1;
  return (int)stream_finish((uintptr_t)handle > 2 ? handle : NULL);
}
