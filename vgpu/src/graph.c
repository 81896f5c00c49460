// Stream capture and graphs. A graph keeps its operations: a launch does its
// copies, fills and host functions again and checks their addresses again.
#include <stdlib.h>
#include <string.h>

#include "stream.h"

static Capture* active;
static uint64_t next_capture = 1;
static __thread int thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

Capture* captures(void) { return active; }

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
      return collective_do(o->argument);
    case NODE_KERNEL:
      if (self) __atomic_fetch_add(&self->kernels, 1, __ATOMIC_RELAXED);
      return CUDA_SUCCESS;
    default:
      return CUDA_SUCCESS;
  }
}

static Node* graph_add(Graph* graph, const Operation* operation) {
  if (graph->nodes == graph->room) {
    graph->room = graph->room ? graph->room * 2 : 64;
    graph->node = realloc(graph->node, graph->room * sizeof *graph->node);
    if (!graph->node) abort();
  }
  Node* node = malloc(sizeof *node);
  if (!node) abort();
  node->operation = *operation;
  graph->node[graph->nodes++] = node;
  return node;
}

static void graph_empty(Graph* graph) {
  for (size_t i = 0; i < graph->nodes; i++) free(graph->node[i]);
  free(graph->node);
}

CUresult capture_add(Stream* stream, const Operation* operation) {
  if (!stream->capture->valid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  stream->last = graph_add(stream->capture->graph, operation);
  stream->steps++;
  return CUDA_SUCCESS;
}

CUresult stream_run(void* handle, const Operation* operation) {
  if (!__atomic_load_n(&active, __ATOMIC_RELAXED)) return operation_do(operation);
  if (!stream_is(handle)) return CUDA_ERROR_INVALID_HANDLE;
  Stream* stream = stream_find(handle);
  CUresult error = CUDA_SUCCESS;
  pthread_mutex_lock(&objects_lock);
  bool captured = stream && stream->capture;
  if (captured) {
    error = capture_add(stream, operation);
  } else if (!stream) {
    for (Capture* c = active; c; c = c->next) {
      if (!c->origin || c->origin->flags & CU_STREAM_NON_BLOCKING) continue;
      c->valid = false;
      error = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
  }
  pthread_mutex_unlock(&objects_lock);
  return captured || error ? error : operation_do(operation);
}

// The rules of cudaThreadExchangeStreamCaptureMode's documentation.
CUresult unsafe_call(void) {
  if (!__atomic_load_n(&active, __ATOMIC_RELAXED)) return CUDA_SUCCESS;
  CUresult error = CUDA_SUCCESS;
  pthread_mutex_lock(&objects_lock);
  for (Capture* c = active; c; c = c->next) {
    if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) break;
    bool mine = pthread_equal(c->thread, pthread_self());
    bool forbids = mine ? c->mode != CU_STREAM_CAPTURE_MODE_RELAXED
                        : c->mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
                              thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (!forbids) continue;
    c->valid = false;
    error = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  pthread_mutex_unlock(&objects_lock);
  return error;
}

// ---- capture

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
                       .valid = true,
                       .next = active};
  stream->capture = capture;
  stream->last = NULL;
  stream->steps = stream->joined = 0;
  __atomic_store_n(&active, capture, __ATOMIC_RELAXED);
  pthread_mutex_unlock(&objects_lock);
  return CUDA_SUCCESS;
}

typedef struct {
  Capture* capture;
  bool unjoined;
} Ending;

static void leave_capture(Stream* stream, void* data) {
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
  streams_each(leave_capture, &ending);
  Capture** at = &active;
  while (*at != capture) at = &(*at)->next;
  __atomic_store_n(at, capture->next, __ATOMIC_RELAXED);
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
  if (!__atomic_load_n(&active, __ATOMIC_RELAXED)) return CUDA_SUCCESS;
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
    for (Capture* c = active; c; c = c->next)
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

static void exchange_mode(int* mode) {
  int old = thread_mode;
  thread_mode = *mode;
  *mode = old;
}

EXPORT cudaError_t
cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode) {
  RT_ENTER(0);
  exchange_mode((int*)mode);
  return cudaSuccess;
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  DRV_ENTER(0);
  exchange_mode((int*)mode);
  return CUDA_SUCCESS;
}

// ---- graphs

typedef struct CUgraphExec_st {
  Operation* operation;
  size_t operations;
  int device;
  int64_t charged;
} Exec;

// What stays until the process ends.
static CUresult first_graph(int device) {
  static bool taken[MAX_DEVICES];
  pthread_mutex_lock(&objects_lock);
  int64_t bytes = taken[device] ? 0 : (int64_t)config.device[device].first_graph;
  bool fits = charge(device, bytes, "first graph");
  taken[device] |= fits;
  pthread_mutex_unlock(&objects_lock);
  return fits ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult instantiate(CUgraphExec* handle, CUgraph graph) {
  *handle = NULL;
  if (!object_is(graph, GRAPH)) return CUDA_ERROR_INVALID_VALUE;
  int device = current_device();
  const DeviceConfig* d = &config.device[device];
  CUresult error = first_graph(device);
  if (error) return error;
  int64_t bytes = (int64_t)(d->graph + d->graph_node * graph->nodes);
  if (!charge(device, bytes, "graph")) return CUDA_ERROR_OUT_OF_MEMORY;
  Exec* exec = object_new(EXEC, sizeof *exec);
  exec->device = device;
  exec->charged = bytes;
  exec->operations = graph->nodes;
  exec->operation = malloc((graph->nodes + 1) * sizeof *exec->operation);
  if (!exec->operation) abort();
  for (size_t i = 0; i < graph->nodes; i++)
    exec->operation[i] = graph->node[i]->operation;
  *handle = exec;
  return CUDA_SUCCESS;
}

static CUresult exec_destroy(CUgraphExec exec) {
  if (!object_is(exec, EXEC)) return CUDA_ERROR_INVALID_VALUE;
  charge(exec->device, -exec->charged, "graph");
  free(exec->operation);
  object_delete(exec, EXEC);
  return CUDA_SUCCESS;
}

static CUresult exec_launch(CUgraphExec exec, CUstream stream) {
  if (!object_is(exec, EXEC)) return CUDA_ERROR_INVALID_VALUE;
  __atomic_fetch_add(&self->graph_launches, 1, __ATOMIC_RELAXED);
  CUresult error = CUDA_SUCCESS;
  for (size_t i = 0; i < exec->operations && !error; i++)
    error = stream_run(stream, &exec->operation[i]);
  return error;
}

static CUresult graph_destroy(CUgraph graph) {
  if (!object_is(graph, GRAPH)) return CUDA_ERROR_INVALID_VALUE;
  graph_empty(graph);
  object_delete(graph, GRAPH);
  return CUDA_SUCCESS;
}

static CUresult graph_nodes(CUgraph graph, CUgraphNode* nodes, size_t* n) {
  if (!object_is(graph, GRAPH)) return CUDA_ERROR_INVALID_VALUE;
  size_t room = nodes ? *n : 0;
  *n = nodes ? MIN(room, graph->nodes) : graph->nodes;
  for (size_t i = 0; i < room; i++) nodes[i] = i < graph->nodes ? graph->node[i] : NULL;
  return CUDA_SUCCESS;
}

EXPORT cudaError_t cudaGraphCreate(cudaGraph_t* graph, unsigned flags) {
  (void)flags;
  RT_ENTER(0);
  *graph = object_new(GRAPH, sizeof(Graph));
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  RT_ENTER(0);
  RT(graph_destroy(graph));
}

EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes,
                                     size_t* n) {
  RT_ENTER(0);
  RT(graph_nodes(graph, nodes, n));
}

EXPORT CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode* nodes, size_t* n) {
  DRV_ENTER(0);
  return graph_nodes(graph, nodes, n);
}

EXPORT cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node,
                                        enum cudaGraphNodeType* type) {
  RT_ENTER(0);
  static const enum cudaGraphNodeType types[] = {
      [NODE_KERNEL] = cudaGraphNodeTypeKernel,
      [NODE_COPY] = cudaGraphNodeTypeMemcpy,
      [NODE_FILL] = cudaGraphNodeTypeMemset,
      [NODE_HOST] = cudaGraphNodeTypeHost,
      [NODE_EVENT] = cudaGraphNodeTypeEventRecord,
      [NODE_EMPTY] = cudaGraphNodeTypeEmpty,
      [NODE_COLLECTIVE] = cudaGraphNodeTypeKernel};
  *type = types[node->operation.kind];
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph,
                                        unsigned long long flags) {
  (void)flags;
  RT_ENTER(0);
  RT(instantiate(exec, graph));
}

EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec,
                                                 cudaGraph_t graph,
                                                 unsigned long long flags) {
  (void)flags;
  RT_ENTER(0);
  RT(instantiate(exec, graph));
}

EXPORT cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream) {
  (void)stream;
  RT_ENTER(0);
  RT(object_is(exec, EXEC) ? 0 : CUDA_ERROR_INVALID_VALUE);
}

EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  RT_ENTER(0);
  RT(exec_destroy(exec));
}

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  RT_ENTER(0);
  RT(exec_launch(exec, stream));
}
