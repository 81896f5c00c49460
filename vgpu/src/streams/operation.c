// What a stream does, at once or when the graph is launched that it captures.
#include <stdlib.h>

#include "state/objects.h"
#include "streams/stream.h"

// ---- streams by their handles

bool stream_is_default(const void* handle) { return (uintptr_t)handle <= 2; }

bool stream_is(void* handle) {
  return stream_is_default(handle) || object_is(handle, STREAM);
}

Stream* stream_find(void* handle) { return stream_is_default(handle) ? NULL : handle; }

// ---- operations

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

void graph_empty(Graph* graph) {
  for (size_t i = 0; i < graph->nodes; i++) free(graph->node[i]);
  free(graph->node);
  kept_release(&graph->kept);
  graph_memory_drop(graph->memory);
}

CUresult capture_add(Stream* stream, const Operation* operation) {
  if (!stream->capture->valid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  stream->last = graph_add(stream->capture->graph, operation);
  stream->steps++;
  return CUDA_SUCCESS;
}

CUresult stream_run(void* handle, const Operation* operation) {
  if (!captures()) return operation_post(stream_find(handle), operation);
  if (!stream_is(handle)) return CUDA_ERROR_INVALID_HANDLE;
  Stream* stream = stream_find(handle);
  CUresult error = CUDA_SUCCESS;
  pthread_mutex_lock(&objects_lock);
  bool captured = stream && stream->capture;
  if (captured) {
    error = capture_add(stream, operation);
  } else if (!stream) {
    for (Capture* c = captures(); c; c = c->next) {
      if (!c->origin || c->origin->flags & CU_STREAM_NON_BLOCKING) continue;
      c->valid = false;
      error = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
  }
  pthread_mutex_unlock(&objects_lock);
  return captured || error ? error : operation_post(stream, operation);
}
