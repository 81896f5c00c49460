// Graphs. A graph keeps its operations: a launch does its copies, fills and host
// functions again and checks their addresses again. What it allocates is there anew.
#include <stdlib.h>

#include "state/account.h"
#include "state/config.h"
#include "state/context.h"
#include "state/objects.h"
#include "streams/stream.h"

typedef struct CUgraphExec_st {
  Operation* operation;
  size_t operations;
  int device;
  int64_t charged;
  Kept kept;
  GraphMemory* memory;  // NULL: no node allocates or frees
  bool frees_at_launch;
  Mark launched;  // last
} Exec;

static CUresult first_graph(int device) {
  static bool taken[MAX_DEVICES];
  uint64_t bytes = config.device[device].first_graph;
  bool fits = charge_once(device, bytes, "first graph", taken);
  return fits ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult instantiate(CUgraphExec* handle, CUgraph graph,
                            unsigned long long flags) {
  *handle = NULL;
  if (!object_is(graph, GRAPH)) return CUDA_ERROR_INVALID_VALUE;
  int device = current_device();
  const DeviceConfig* d = &config.device[device];
  CUresult error = first_graph(device);
  if (error) return error;
  int64_t bytes = (int64_t)(d->graph + d->graph_node * graph->nodes);
  if (graph->memory && !graph_memory_instantiate(graph->memory))
    return CUDA_ERROR_INVALID_VALUE;
  if (!charge(device, bytes, "graph")) {
    if (graph->memory) graph_memory_uninstantiate(graph->memory);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  Exec* exec = object_new(EXEC, sizeof *exec);
  exec->device = device;
  exec->charged = bytes;
  exec->operations = graph->nodes;
  exec->operation = malloc((graph->nodes + 1) * sizeof *exec->operation);
  if (!exec->operation) abort();
  for (size_t i = 0; i < graph->nodes; i++)
    exec->operation[i] = graph->node[i]->operation;
  kept_copy(&exec->kept, &graph->kept);
  exec->memory = graph->memory;
  exec->frees_at_launch = flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
  *handle = exec;
  return CUDA_SUCCESS;
}

static CUresult exec_destroy(CUgraphExec exec) {
  if (!object_is(exec, EXEC)) return CUDA_ERROR_INVALID_VALUE;
  charge(exec->device, -exec->charged, "graph");
  free(exec->operation);
  kept_release(&exec->kept);
  if (exec->memory) graph_memory_uninstantiate(exec->memory);
  object_delete(exec, EXEC);
  return CUDA_SUCCESS;
}

static CUresult captured_launch(Stream* stream) {
  pthread_mutex_lock(&objects_lock);
  stream->capture->valid = false;
  pthread_mutex_unlock(&objects_lock);
  return CUDA_ERROR_NOT_SUPPORTED;  // such a graph can be no part of another
}

static CUresult post_free(Stream* stream, GraphAllocation* a) {
  return operation_post(
      stream, &(Operation){.kind = NODE_FREE, .to = a->address, .argument = a});
}

// Memory for the graph's allocations, and none for those that the last launch left.
static CUresult memory_launch(CUgraphExec exec, CUstream handle) {
  Stream* stream = stream_is(handle) ? stream_find(handle) : NULL;
  if (stream && stream->capture) return captured_launch(stream);
  // Before anything changes: whether the stream may be used.
  CUresult error = stream_run(handle, &(Operation){.kind = NODE_EVENT});
  // A launch follows the last one of the graph, in whatever stream that was.
  if (!error) error = mark_finish(&exec->launched);
  if (!error) error = stream_finish_frees(stream);
  for (size_t i = 0; i < exec->operations && !error; i++) {
    const Operation* o = &exec->operation[i];
    if (o->kind == NODE_FREE && !o->argument && !graph_memory_is_held(o->to))
      error = CUDA_ERROR_INVALID_VALUE;
  }
  GraphAllocation* left;
  while (!error && exec->frees_at_launch &&
         (left = graph_memory_release(exec->memory, 0)))
    error = post_free(stream, left);
  if (!error) error = graph_memory_launch(exec->memory, stream);
  if (error == CUDA_ERROR_OUT_OF_MEMORY && config.streams_behind) {
    error = device_finish();
    if (!error) error = graph_memory_launch(exec->memory, stream);
  }
  return error;
}

static CUresult operation_launch(CUstream handle, const Operation* o) {
  if (o->kind != NODE_FREE || o->argument) return stream_run(handle, o);
  GraphAllocation* of_another = graph_memory_release(NULL, o->to);
  return of_another ? post_free(stream_find(handle), of_another) : CUDA_SUCCESS;
}

static CUresult exec_launch(CUgraphExec exec, CUstream stream) {
  if (!object_is(exec, EXEC)) return CUDA_ERROR_INVALID_VALUE;
  CUresult error = exec->memory ? memory_launch(exec, stream) : CUDA_SUCCESS;
  if (error) return error;
  __atomic_fetch_add(&self->graph_launches, 1, __ATOMIC_RELAXED);
  for (size_t i = 0; i < exec->operations && !error; i++)
    error = operation_launch(stream, &exec->operation[i]);
  if (exec->memory) {
    const Operation done = {.kind = NODE_DONE, .argument = exec->memory};
    CUresult failed = operation_post(stream_find(stream), &done);
    if (!error) error = failed;
    exec->launched = stream_mark(stream_find(stream));
  }
  return error;
}

static CUresult exec_upload(CUgraphExec exec, CUstream stream) {
  if (!object_is(exec, EXEC)) return CUDA_ERROR_INVALID_VALUE;
  if (!exec->memory) return CUDA_SUCCESS;
  return graph_memory_upload(exec->memory, stream_find(stream));
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
      [NODE_COLLECTIVE] = cudaGraphNodeTypeKernel,
      [NODE_ALLOCATE] = cudaGraphNodeTypeMemAlloc,
      [NODE_FREE] = cudaGraphNodeTypeMemFree};
  *type = types[node->operation.kind];
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph,
                                        unsigned long long flags) {
  RT_ENTER(0);
  RT(instantiate(exec, graph, flags));
}

EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec,
                                                 cudaGraph_t graph,
                                                 unsigned long long flags) {
  RT_ENTER(0);
  RT(instantiate(exec, graph, flags));
}

EXPORT cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream) {
  RT_ENTER(0);
  RT(exec_upload(exec, stream));
}

EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  RT_ENTER(0);
  RT(exec_destroy(exec));
}

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  RT_ENTER(0);
  RT(exec_launch(exec, stream));
}
