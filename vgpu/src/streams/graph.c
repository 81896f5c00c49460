// Graphs. A graph keeps its operations: a launch does its copies, fills and host
// functions again and checks their addresses again.
#include <stdlib.h>

#include "state/account.h"
#include "state/context.h"
#include "state/objects.h"
#include "streams/stream.h"

typedef struct CUgraphExec_st {
  Operation* operation;
  size_t operations;
  int device;
  int64_t charged;
  Kept kept;
} Exec;

static CUresult first_graph(int device) {
  static bool taken[MAX_DEVICES];
  uint64_t bytes = config.device[device].first_graph;
  bool fits = charge_once(device, bytes, "first graph", taken);
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
  kept_copy(&exec->kept, &graph->kept);
  *handle = exec;
  return CUDA_SUCCESS;
}

static CUresult exec_destroy(CUgraphExec exec) {
  if (!object_is(exec, EXEC)) return CUDA_ERROR_INVALID_VALUE;
  charge(exec->device, -exec->charged, "graph");
  free(exec->operation);
  kept_release(&exec->kept);
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

// ---- graph memory nodes are absent, so graphs hold none

EXPORT cudaError_t cudaDeviceGetGraphMemAttribute(
    int device, enum cudaGraphMemAttributeType attribute, void* value) {
  (void)device;
  (void)attribute;
  RT_ENTER(0);
  *(uint64_t*)value = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSetGraphMemAttribute(
    int device, enum cudaGraphMemAttributeType attribute, void* value) {
  (void)device;
  (void)attribute;
  (void)value;
  RT_ENTER(0);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGraphMemTrim(int device) {
  (void)device;
  RT_ENTER(0);
  return cudaSuccess;
}
