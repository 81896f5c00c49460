// Groups of NCCL: calls that a thread collects between start and end.
#include <stdlib.h>

#include "sources/communicator.h"
#include "state/objects.h"

typedef struct Work {
  ncclComm_t comm;
  ncclComm_t* joins;  // a communicator that is being made
  Batch* batch;
  ncclResult_t result;
  pthread_t thread;
  struct Work* next;
} Work;

static __thread int depth;
static __thread Work *work_first, **work_end;

static void* work_do(void* argument) {
  Work* w = argument;
  cudaSetDevice(w->comm->ordinal);
  w->result = w->joins ? comm_ready(w->joins) : batch_launch(w->batch);
  return NULL;
}

// Communicators of one thread wait for one another: each has a thread of its own.
static ncclResult_t group_end(void) {
  ncclResult_t result = ncclSuccess;
  bool alone = work_first && !work_first->next;
  if (alone) {
    Work* w = work_first;
    result = w->joins ? comm_ready(w->joins) : batch_launch(w->batch);
  }
  for (Work* w = work_first; w && !alone; w = w->next)
    if (pthread_create(&w->thread, NULL, work_do, w)) abort();
  for (Work *w = work_first, *next; w; w = next) {
    if (!alone) {
      pthread_join(w->thread, NULL);
      if (!result) result = w->result;
    }
    next = w->next;
    free(w);
  }
  work_first = NULL;
  return result;
}

static Work* work_add(ncclComm_t comm) {
  Work* w = calloc(1, sizeof *w);
  if (!w) abort();
  w->comm = comm;
  if (!work_first) work_end = &work_first;
  *work_end = w;
  work_end = &w->next;
  return w;
}

ncclResult_t work_join(ncclComm_t* handle) {
  work_add(*handle)->joins = handle;
  return depth ? ncclSuccess : group_end();
}

ncclResult_t work_task(ncclComm_t comm, const Task* task) {
  Work* w = work_first;
  while (w && (w->comm != comm || !w->batch)) w = w->next;
  if (!w) {
    w = work_add(comm);
    w->batch = object_new(COLLECTIVE, sizeof *w->batch);
    w->batch->comm = comm;
  }
  batch_add(w->batch, task);
  return depth ? ncclSuccess : group_end();
}

EXPORT ncclResult_t ncclGroupStart(void) {
  depth++;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclGroupEnd(void) {
  if (!depth) return nccl_fail(ncclInvalidUsage, "ncclGroupEnd: not in a group call");
  return --depth ? ncclSuccess : group_end();
}
