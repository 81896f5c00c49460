// User objects: graphs keep them alive for a program, and the last of these ends them.
#include <stdlib.h>

#include "state/context.h"
#include "state/objects.h"
#include "streams/stream.h"

typedef struct CUuserObject_st {
  void* pointer;
  CUhostFn destroy;
  uint64_t references;
} UserObject;

// With objects_lock held. True: that was the last one.
static bool give(UserObject* object, uint64_t n) {
  object->references -= MIN(n, object->references);
  return !object->references;
}

// CUDA calls it in a thread of its own, at some time.
static void end(UserObject* object) {
  object->destroy(object->pointer);
  object_delete(object, USER_OBJECT);
}

static CUresult create(CUuserObject* handle, void* pointer, CUhostFn destroy,
                       unsigned references, unsigned flags) {
  if (!handle || !destroy || !references || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
    return CUDA_ERROR_INVALID_VALUE;
  *handle = object_new(USER_OBJECT, sizeof(UserObject));
  **handle = (UserObject){pointer, destroy, references};
  return CUDA_SUCCESS;
}

static CUresult retain(CUuserObject object, unsigned n) {
  pthread_mutex_lock(&objects_lock);
  bool right = n && object_is_locked(object, USER_OBJECT);
  if (right) object->references += n;
  pthread_mutex_unlock(&objects_lock);
  return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult release(CUuserObject object, unsigned n) {
  pthread_mutex_lock(&objects_lock);
  bool right = n && object_is_locked(object, USER_OBJECT) && n <= object->references;
  bool last = right && give(object, n);
  pthread_mutex_unlock(&objects_lock);
  if (last) end(object);
  return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static void hold(Kept* kept, CUuserObject object, uint64_t n) {
  kept->of = realloc(kept->of, (kept->n + 1) * sizeof *kept->of);
  if (!kept->of) abort();
  kept->of[kept->n].object = object;
  kept->of[kept->n++].references = n;
}

static CUresult graph_retain(CUgraph graph, CUuserObject object, unsigned n,
                             unsigned flags) {
  pthread_mutex_lock(&objects_lock);
  bool right = n && !(flags & ~CU_GRAPH_USER_OBJECT_MOVE) &&
               object_is_locked(graph, GRAPH) && object_is_locked(object, USER_OBJECT);
  bool moved = flags & CU_GRAPH_USER_OBJECT_MOVE;
  right = right && (!moved || n <= object->references);
  if (right) hold(&graph->kept, object, n);
  if (right && !moved) object->references += n;
  pthread_mutex_unlock(&objects_lock);
  return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult graph_release(CUgraph graph, CUuserObject object, unsigned n) {
  uint64_t left = n;
  pthread_mutex_lock(&objects_lock);
  bool right = object_is_locked(graph, GRAPH);
  for (size_t i = 0; right && i < graph->kept.n; i++) {
    if (graph->kept.of[i].object != object) continue;
    uint64_t given = MIN(left, graph->kept.of[i].references);
    graph->kept.of[i].references -= given;
    left -= given;
  }
  bool last = right && n > left && give(object, n - left);
  pthread_mutex_unlock(&objects_lock);
  if (last) end(object);
  return right && n && !left ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

void kept_copy(Kept* to, const Kept* from) {
  *to = (Kept){0};
  pthread_mutex_lock(&objects_lock);
  for (size_t i = 0; i < from->n; i++) {
    if (!from->of[i].references) continue;
    hold(to, from->of[i].object, from->of[i].references);
    from->of[i].object->references += from->of[i].references;
  }
  pthread_mutex_unlock(&objects_lock);
}

void kept_release(Kept* kept) {
  for (size_t i = 0; i < kept->n; i++)
    if (kept->of[i].references)
      release(kept->of[i].object, (unsigned)kept->of[i].references);
  free(kept->of);
  *kept = (Kept){0};
}

BOTH(cudaUserObjectCreate, cuUserObjectCreate,
     (cudaUserObject_t * object, void* pointer, cudaHostFn_t destroy, unsigned n,
      unsigned flags),
     (CUuserObject * object, void* pointer, CUhostFn destroy, unsigned n,
      unsigned flags),
     create(object, pointer, destroy, n, flags))
BOTH(cudaUserObjectRetain, cuUserObjectRetain, (cudaUserObject_t object, unsigned n),
     (CUuserObject object, unsigned n), retain(object, n))
BOTH(cudaUserObjectRelease, cuUserObjectRelease, (cudaUserObject_t object, unsigned n),
     (CUuserObject object, unsigned n), release(object, n))
BOTH(cudaGraphRetainUserObject, cuGraphRetainUserObject,
     (cudaGraph_t graph, cudaUserObject_t object, unsigned n, unsigned flags),
     (CUgraph graph, CUuserObject object, unsigned n, unsigned flags),
     graph_retain(graph, object, n, flags))
BOTH(cudaGraphReleaseUserObject, cuGraphReleaseUserObject,
     (cudaGraph_t graph, cudaUserObject_t object, unsigned n),
     (CUgraph graph, CUuserObject object, unsigned n), graph_release(graph, object, n))
