// Streams and events. What is not captured is done when it is asked for, or with
// streams that are behind (queue.c) when it is waited for.
#include "streams/stream.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "state/config.h"
#include "state/context.h"
#include "state/objects.h"
#include "state/state.h"

static uint64_t next_id = 1;

// ---- streams

static CUresult stream_create(CUstream* handle, unsigned flags, int priority) {
  Stream* stream = object_new(STREAM, sizeof *stream);
  stream->ordinal = current_ordinal();
  stream->flags = flags;
  stream->priority = MAX(-5, MIN(0, priority));
  stream->id = __atomic_fetch_add(&next_id, 1, __ATOMIC_RELAXED);
  *handle = stream;
  return CUDA_SUCCESS;
}

static CUresult stream_destroy(CUstream handle) {
  if (stream_is_default(handle) || !object_is(handle, STREAM))
    return CUDA_ERROR_INVALID_HANDLE;
  stream_finish(handle);
  pthread_mutex_lock(&objects_lock);
  if (handle->capture) {
    handle->capture->valid = false;
    if (handle->capture->origin == handle) handle->capture->origin = NULL;
  }
  pthread_mutex_unlock(&objects_lock);
  object_delete(handle, STREAM);
  return CUDA_SUCCESS;
}

static CUresult wait_for_stream(CUstream handle, bool query) {
  if (!stream_is(handle)) return CUDA_ERROR_INVALID_HANDLE;
  Stream* stream = stream_find(handle);
  if ((!stream || !stream->capture) && !query) return stream_finish(stream);
  if (!stream || !stream->capture) {
    Mark all = stream_all(stream);
    return mark_is_reached(&all) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  }
  pthread_mutex_lock(&objects_lock);
  stream->capture->valid = false;
  pthread_mutex_unlock(&objects_lock);
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

static CUresult stream_wait(CUstream handle, CUevent event) {
  if (!stream_is(handle) || !object_is(event, EVENT)) return CUDA_ERROR_INVALID_HANDLE;
  if (!event->capture) {
    stream_wait_for(stream_find(handle), &event->mark);
    return CUDA_SUCCESS;
  }
  CUresult error = CUDA_SUCCESS;
  pthread_mutex_lock(&objects_lock);
  Capture* capture = captures();
  while (capture && capture->id != event->capture) capture = capture->next;
  Stream* stream = stream_find(handle);
  if (!capture) {
    error = CUDA_SUCCESS;  // that capture has ended: the event means nothing
  } else if (!stream) {
    error = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  } else if (stream->capture && stream->capture != capture) {
    stream->capture->valid = capture->valid = false;
    error = CUDA_ERROR_STREAM_CAPTURE_MERGE;
  } else {
    if (!stream->capture) {
      stream->capture = capture;
      stream->steps = stream->joined = 0;
    }
    Stream* from = event->stream;
    if (from != stream && object_is_locked(from, STREAM) && from->capture == capture)
      from->joined = MAX(from->joined, event->steps);
    stream->steps++;
    if (object_is_locked(from, STREAM)) stream->last = from->last;
  }
  pthread_mutex_unlock(&objects_lock);
  return error;
}

static CUresult add_callback(CUstream handle, void (*function)(void*), void* data) {
  return stream_run(
      handle, &(Operation){.kind = NODE_HOST, .function = function, .argument = data});
}

// ---- events

static CUresult event_create(CUevent* handle, unsigned flags) {
  if (flags & CU_EVENT_INTERPROCESS && !(flags & CU_EVENT_DISABLE_TIMING))
    return CUDA_ERROR_INVALID_VALUE;
  Event* event = object_new(EVENT, sizeof *event);
  event->flags = flags;
  event->ordinal = current_ordinal();
  *handle = event;
  return CUDA_SUCCESS;
}

static CUresult event_record(CUevent event, CUstream handle, unsigned flags) {
  if (!object_is(event, EVENT) || !stream_is(handle)) return CUDA_ERROR_INVALID_HANDLE;
  Stream* stream = stream_find(handle);
  CUresult error = CUDA_SUCCESS;
  bool captured = stream && stream->capture;
  if (!captured) event->mark = stream_mark(stream);
  // Another process does not see how far this one is: nothing is behind there.
  if (!captured && event->flags & CU_EVENT_INTERPROCESS) mark_finish(&event->mark);
  pthread_mutex_lock(&objects_lock);
  if (captured) {
    if (!stream->capture->valid) {
      error = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    } else if (flags & CU_EVENT_RECORD_EXTERNAL) {
      error = capture_add(stream, &(Operation){.kind = NODE_EVENT});
    } else {
      event->capture = stream->capture->id;
      event->stream = stream;
      event->steps = stream->steps;
    }
  } else {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    event->nanoseconds = (uint64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    event->capture = 0;
    event->recorded = true;
  }
  pthread_mutex_unlock(&objects_lock);
  return error;
}

static CUresult event_query(CUevent event, bool wait) {
  CUresult error = context_usable();
  if (error) return error;
  if (!object_is(event, EVENT)) return CUDA_ERROR_INVALID_HANDLE;
  error = unsafe_call();
  if (error) return error;
  bool captured = false;
  pthread_mutex_lock(&objects_lock);
  for (Capture* c = captures(); c && event->capture; c = c->next)
    captured |= c->id == event->capture;
  pthread_mutex_unlock(&objects_lock);
  if (captured) return CUDA_ERROR_CAPTURED_EVENT;
  if (wait) return mark_finish(&event->mark);
  return mark_is_reached(&event->mark) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

static CUresult event_elapsed(float* milliseconds, CUevent start, CUevent end) {
  if (!object_is(start, EVENT) || !object_is(end, EVENT) || !start->recorded ||
      !end->recorded || start->ordinal != end->ordinal ||
      (start->flags | end->flags) & CU_EVENT_DISABLE_TIMING)
    return CUDA_ERROR_INVALID_HANDLE;
  *milliseconds =
      (float)((double)((int64_t)(end->nanoseconds - start->nanoseconds)) / 1e6);
  return CUDA_SUCCESS;
}

// What a handle of an event holds. What is recorded there is done there, so the event
// of who opens it is its own.
typedef struct {
  char kind[8];
  ProcessId process;
} Handle;
static const char KIND[8] = "vgpu-evt";

static CUresult event_export(void* handle, CUevent event) {
  if (!object_is(event, EVENT) || !(event->flags & CU_EVENT_INTERPROCESS))
    return CUDA_ERROR_INVALID_HANDLE;
  if (!handle) return CUDA_ERROR_INVALID_VALUE;
  Handle e = {.process = process_id()};
  memcpy(e.kind, KIND, sizeof e.kind);
  memset(handle, 0, sizeof(CUipcEventHandle));
  memcpy(handle, &e, sizeof e);
  return CUDA_SUCCESS;
}

static CUresult event_open(CUevent* event, const void* handle) {
  Handle e;
  memcpy(&e, handle, sizeof e);
  if (!event || memcmp(e.kind, KIND, sizeof e.kind)) return CUDA_ERROR_INVALID_VALUE;
  if (e.process.pid == process_id().pid) return CUDA_ERROR_INVALID_CONTEXT;
  if (process_is_dead(&e.process)) return CUDA_ERROR_INVALID_HANDLE;
  return event_create(event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING);
}

// ---- the calls, runtime and driver

BOTH(cudaStreamCreateWithFlags, cuStreamCreate, (cudaStream_t * s, unsigned flags),
     (CUstream * s, unsigned flags), stream_create(s, flags, 0))
BOTH(cudaStreamCreateWithPriority, cuStreamCreateWithPriority,
     (cudaStream_t * s, unsigned flags, int priority),
     (CUstream * s, unsigned flags, int priority), stream_create(s, flags, priority))
BOTH(cudaStreamDestroy, cuStreamDestroy, (cudaStream_t s), (CUstream s),
     stream_destroy(s))
BOTH(cudaStreamSynchronize, cuStreamSynchronize, (cudaStream_t s), (CUstream s),
     wait_for_stream(s, false))
BOTH(cudaStreamQuery, cuStreamQuery, (cudaStream_t s), (CUstream s),
     wait_for_stream(s, true))
BOTH(cudaStreamWaitEvent, cuStreamWaitEvent,
     (cudaStream_t s, cudaEvent_t e, unsigned flags),
     (CUstream s, CUevent e, unsigned flags), ((void)flags, stream_wait(s, e)))
BOTH(cudaLaunchHostFunc, cuLaunchHostFunc,
     (cudaStream_t s, cudaHostFn_t function, void* data),
     (CUstream s, CUhostFn function, void* data), add_callback(s, function, data))
BOTH(cudaEventCreateWithFlags, cuEventCreate, (cudaEvent_t * e, unsigned flags),
     (CUevent * e, unsigned flags), event_create(e, flags))
BOTH(cudaEventDestroy, cuEventDestroy, (cudaEvent_t e), (CUevent e),
     object_delete(e, EVENT) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE)
BOTH(cudaEventRecord, cuEventRecord, (cudaEvent_t e, cudaStream_t s),
     (CUevent e, CUstream s), event_record(e, s, 0))
BOTH(cudaEventRecordWithFlags, cuEventRecordWithFlags,
     (cudaEvent_t e, cudaStream_t s, unsigned flags),
     (CUevent e, CUstream s, unsigned flags), event_record(e, s, flags))
BOTH(cudaIpcGetEventHandle, cuIpcGetEventHandle,
     (cudaIpcEventHandle_t * handle, cudaEvent_t e),
     (CUipcEventHandle * handle, CUevent e), event_export(handle, e))
BOTH(cudaIpcOpenEventHandle, cuIpcOpenEventHandle,
     (cudaEvent_t * e, cudaIpcEventHandle_t handle),
     (CUevent * e, CUipcEventHandle handle), event_open(e, &handle))
// An event has its context. PyTorch's watchdog of NCCL asks in a thread that has none,
// and must not make one on device 0 for each rank.
#define OF_EVENT(rt, drv, wait)          \
  EXPORT cudaError_t rt(cudaEvent_t e) { \
    RT_START();                          \
    RT(event_query(e, wait));            \
  }                                      \
  EXPORT CUresult drv(CUevent e) {       \
    DRV_START();                         \
    return event_query(e, wait);         \
  }
OF_EVENT(cudaEventQuery, cuEventQuery, false)
OF_EVENT(cudaEventSynchronize, cuEventSynchronize, true)
BOTH(cudaEventElapsedTime, cuEventElapsedTime,
     (float* ms, cudaEvent_t a, cudaEvent_t b), (float* ms, CUevent a, CUevent b),
     event_elapsed(ms, a, b))

EXPORT cudaError_t cudaStreamCreate(cudaStream_t* s) {
  RT_ENTER(0);
  RT(stream_create(s, 0, 0));
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t* e) {
  RT_ENTER(0);
  RT(event_create(e, 0));
}

typedef struct {
  cudaStreamCallback_t function;
  cudaStream_t stream;
  void* data;
} Callback;

static void callback_run(void* argument) {
  Callback* callback = argument;
  callback->function(callback->stream, cudaSuccess, callback->data);
  free(callback);
}

EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream,
                                         cudaStreamCallback_t function, void* data,
                                         unsigned flags) {
  (void)flags;
  RT_ENTER(0);
  Stream* captured = stream_is(stream) ? stream_find(stream) : NULL;
  if (captured && captured->capture) RT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  Callback* callback = malloc(sizeof *callback);
  if (!callback) abort();
  *callback = (Callback){function, stream, data};
  RT(add_callback(stream, callback_run, callback));
}

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t s, int* priority) {
  RT_ENTER(0);
  if (!stream_is(s)) RT(CUDA_ERROR_INVALID_HANDLE);
  *priority = stream_is_default(s) ? 0 : s->priority;
  return cudaSuccess;
}

EXPORT CUresult cuStreamGetPriority(CUstream s, int* priority) {
  return (CUresult)cudaStreamGetPriority(s, priority);
}

EXPORT cudaError_t cudaStreamGetFlags(cudaStream_t s, unsigned* flags) {
  RT_ENTER(0);
  if (!stream_is(s)) RT(CUDA_ERROR_INVALID_HANDLE);
  *flags = stream_is_default(s) ? 0 : s->flags;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetDevice(cudaStream_t s, int* ordinal) {
  RT_ENTER(0);
  if (!stream_is(s)) RT(CUDA_ERROR_INVALID_HANDLE);
  *ordinal = stream_is_default(s) ? current_ordinal() : s->ordinal;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetId(cudaStream_t s, unsigned long long* id) {
  RT_ENTER(0);
  if (!stream_is(s)) RT(CUDA_ERROR_INVALID_HANDLE);
  *id = stream_is_default(s) ? 0 : s->id;
  return cudaSuccess;
}

EXPORT CUresult cuStreamGetCtx(CUstream s, CUcontext* context) {
  DRV_ENTER(0);
  if (!stream_is(s)) return CUDA_ERROR_INVALID_HANDLE;
  *context = context_of(stream_is_default(s) ? current_ordinal() : s->ordinal);
  return CUDA_SUCCESS;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  RT_ENTER(0);
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

// ---- waiting for the device

static CUresult device_wait(void) {
  if (config.synchronize_us) usleep((unsigned)config.synchronize_us);
  CUresult error = unsafe_call();
  return error ? error : device_finish();
}

EXPORT cudaError_t cudaDeviceSynchronize(void) {
  RT_ENTER(0);
  RT(device_wait());
}

EXPORT CUresult cuCtxSynchronize(void) {
  DRV_ENTER(0);
  return device_wait();
}
