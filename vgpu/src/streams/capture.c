// Stream capture.
#include <stdlib.h>

#include "state/context.h"
#include "state/objects.h"
#include "streams/stream.h"

static uint64_t next_capture = 1;

static CUresult capture_begin(Stream* handle, int mode) {
  Stream* stream = stream_is(handle) ? stream_find(handle) : NULL;
  if (!stream)
    return stream_is(handle) ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
                             : CUDA_ERROR_INVALID_HANDLE;
  Graph* graph = object_new(GRAPH, sizeof *graph);
  Capture* capture = calloc(1, sizeof *capture);
  if (!capture) abort();
  pthread_mutex_lock(&objects_lock);
  if (stream->capture) {
    pthread_mutex_unlock(&objects_lock);
    free(capture);
    object_delete(graph, GRAPH);
    return CUDA_ERROR_ILLEGAL_STATE;
  }
  *capture = (Capture){.id = next_capture++,
                       .mode = mode,
                       .origin = stream,
                       .thread = pthread_self(),
                       .graph = graph,
                       .valid = true};
  stream->capture = capture;
  stream->last = NULL;
  stream->steps = stream->joined = 0;
  capture_begun(capture);
  pthread_mutex_unlock(&objects_lock);
  return CUDA_SUCCESS;
}

typedef struct {
  Capture* capture;
  bool unjoined;
} Ending;

static void leave_capture(void* object, void* data) {
  Stream* stream = object;
  Ending* ending = data;
  if (stream->capture != ending->capture) return;
  if (stream != ending->capture->origin && stream->joined < stream->steps)
    ending->unjoined = true;
  stream->capture = NULL;
  stream->last = NULL;
}

static CUresult capture_finish(Stream* handle, CUgraph* graph) {
  *graph = NULL;
  Stream* stream = stream_is(handle) ? stream_find(handle) : NULL;
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  pthread_mutex_lock(&objects_lock);
  Capture* capture = stream->capture;
  CUresult error = !capture                    ? CUDA_ERROR_ILLEGAL_STATE
                   : capture->origin != stream ? CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
                   : capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED &&
                           !pthread_equal(capture->thread, pthread_self())
                       ? CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
                       : CUDA_SUCCESS;
  if (error) {
    pthread_mutex_unlock(&objects_lock);
    return error;
  }
  Ending ending = {capture, false};
  objects_each(STREAM, leave_capture, &ending);
  capture_ended(capture);
  pthread_mutex_unlock(&objects_lock);
  error = !capture->valid   ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
          : ending.unjoined ? CUDA_ERROR_STREAM_CAPTURE_UNJOINED
                            : CUDA_SUCCESS;
  if (error) {
    graph_empty(capture->graph);
    object_delete(capture->graph, GRAPH);
  } else {
    *graph = capture->graph;
  }
  free(capture);
  return error;
}

typedef struct {
  int status;
  uint64_t id;
  Graph* graph;
  Stream* stream;
} CaptureState;

static CUresult capture_state(void* handle, CaptureState* state) {
  *state = (CaptureState){0};
  if (!captures()) return CUDA_SUCCESS;
  if (!stream_is(handle)) return CUDA_ERROR_INVALID_HANDLE;
  Stream* stream = stream_find(handle);
  CUresult error = CUDA_SUCCESS;
  pthread_mutex_lock(&objects_lock);
  if (stream && stream->capture) {
    Capture* c = stream->capture;
    *state = (CaptureState){c->valid ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                                     : CU_STREAM_CAPTURE_STATUS_INVALIDATED,
                            c->id, c->graph, stream};
  } else if (!stream && (uintptr_t)handle < 2) {
    for (Capture* c = captures(); c; c = c->next)
      if (c->origin && !(c->origin->flags & CU_STREAM_NON_BLOCKING))
        error = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  pthread_mutex_unlock(&objects_lock);
  return error;
}

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream,
                                          enum cudaStreamCaptureMode mode) {
  RT_ENTER(0);
  RT(capture_begin(stream, (int)mode));
}

EXPORT CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
  DRV_ENTER(0);
  return capture_begin(stream, (int)mode);
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  RT_ENTER(0);
  RT(capture_finish(stream, graph));
}

EXPORT CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  DRV_ENTER(0);
  return capture_finish(stream, graph);
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream,
                                         enum cudaStreamCaptureStatus* status) {
  RT_ENTER(0);
  CaptureState state;
  CUresult error = capture_state(stream, &state);
  *status = (enum cudaStreamCaptureStatus)state.status;
  RT(error);
}

EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  DRV_ENTER(0);
  CaptureState state;
  CUresult error = capture_state(stream, &state);
  *status = (CUstreamCaptureStatus)state.status;
  return error;
}

static CUresult capture_info(CUstream stream, int* status, unsigned long long* id,
                             CUgraph* graph, const CUgraphNode** dependencies,
                             const CUgraphEdgeData** edges, size_t* n) {
  CaptureState state;
  CUresult error = capture_state(stream, &state);
  if (error) return error;
  *status = state.status;
  if (id) *id = state.id;
  if (graph) *graph = state.graph;
  bool depends = state.stream && state.stream->last;
  if (dependencies)
    *dependencies = depends ? (const CUgraphNode*)&state.stream->last : NULL;
  if (edges) *edges = NULL;
  if (n) *n = depends;
  return CUDA_SUCCESS;
}

#if CUDART_VERSION < 13000  // where version 2, without edges, has the plain name
#define CAPTURE_INFO(name) name##_v3
EXPORT cudaError_t cudaStreamGetCaptureInfo_v2(
    cudaStream_t stream, enum cudaStreamCaptureStatus* status, unsigned long long* id,
    cudaGraph_t* graph, const cudaGraphNode_t** dependencies, size_t* n) {
  RT_ENTER(0);
  RT(capture_info(stream, (int*)status, id, graph, dependencies, NULL, n));
}

EXPORT CUresult cuStreamGetCaptureInfo_v2(CUstream stream,
                                          CUstreamCaptureStatus* status, cuuint64_t* id,
                                          CUgraph* graph,
                                          const CUgraphNode** dependencies, size_t* n) {
  DRV_ENTER(0);
  unsigned long long capture_id = 0;
  CUresult error =
      capture_info(stream, (int*)status, &capture_id, graph, dependencies, NULL, n);
  if (id) *id = capture_id;
  return error;
}
#else
#define CAPTURE_INFO(name) name
#endif

EXPORT cudaError_t CAPTURE_INFO(cudaStreamGetCaptureInfo)(
    cudaStream_t stream, enum cudaStreamCaptureStatus* status, unsigned long long* id,
    cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
    const cudaGraphEdgeData** edges, size_t* n) {
  RT_ENTER(0);
  RT(capture_info(stream, (int*)status, id, graph, dependencies,
                  (const CUgraphEdgeData**)edges, n));
}

EXPORT CUresult CAPTURE_INFO(cuStreamGetCaptureInfo)(
    CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
    const CUgraphNode** dependencies, const CUgraphEdgeData** edges, size_t* n) {
  DRV_ENTER(0);
  unsigned long long capture_id = 0;
  CUresult error =
      capture_info(stream, (int*)status, &capture_id, graph, dependencies, edges, n);
  if (id) *id = capture_id;
  return error;
}

EXPORT cudaError_t
cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode) {
  RT_ENTER(0);
  capture_mode_exchange((int*)mode);
  return cudaSuccess;
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  DRV_ENTER(0);
  capture_mode_exchange((int*)mode);
  return CUDA_SUCCESS;
}
