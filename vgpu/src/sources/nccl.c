// NCCL: collectives between the processes of a run. Memory is real, so they move and
// reduce it.
#include <string.h>
#include <sys/random.h>

#include "memory/memory.h"
#include "sources/communicator.h"
#include "state/account.h"
#include "state/context.h"
#include "state/objects.h"

static ncclResult_t enter(const char* call, uint64_t size, CUresult error) {
  if (error)
    return nccl_fail(ncclUnhandledCudaError, "%s: %s", call,
                     cudaGetErrorString((cudaError_t)error));
  if (config.trace) message("%s(%lu)", call, size);
  int injection = injected(call, current_device(), size);
  return injection ? nccl_fail(injection, "%s: injected", call) : ncclSuccess;
}

#define ENTER(size) TRY(enter(__func__, (size), context_enter()))
// A communicator has its context: the thread that asks for it, as PyTorch's watchdog
// does, gets none on device 0.
#define ENTER_COMM(comm)                                            \
  do {                                                              \
    TRY(enter(__func__, 0, context_usable()));                      \
    if (!object_is(comm, COMMUNICATOR)) return ncclInvalidArgument; \
  } while (0)

// ---- the calls: communicators

EXPORT ncclResult_t ncclGetVersion(int* version) {
  if (!version) return ncclInvalidArgument;
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (!id) return ncclInvalidArgument;
  memset(id, 0, sizeof *id);
  ssize_t n = getrandom(id, 32, 0);
  return n == 32 ? ncclSuccess : nccl_fail(ncclSystemError, "getrandom");
}

EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id,
                                           int rank, ncclConfig_t* options) {
  (void)options;
  ENTER(0);
  TRY(comm_new(comm, current_ordinal(), ranks, rank, &id, sizeof id));
  return work_join(comm);
}

EXPORT ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id,
                                     int rank) {
  return ncclCommInitRankConfig(comm, ranks, id, rank, NULL);
}

EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int ranks, int rank,
                                             int n, ncclUniqueId* ids,
                                             ncclConfig_t* options) {
  if (n < 1 || !ids) return ncclInvalidArgument;
  return ncclCommInitRankConfig(comm, ranks, ids[0], rank, options);
}

EXPORT ncclResult_t ncclCommInitAll(ncclComm_t* comm, int n, const int* ordinals) {
  ENTER(0);
  ncclUniqueId id;
  TRY(ncclGetUniqueId(&id));
  ncclGroupStart();
  ncclResult_t result = ncclSuccess;
  for (int i = 0; i < n && !result; i++) {
    int ordinal = ordinals ? ordinals[i] : i;
    if (ordinal < 0 || ordinal >= visible_devices())
      result = nccl_fail(ncclInvalidArgument, "there is no device %d", ordinal);
    else
      result = comm_new(&comm[i], ordinal, n, i, &id, sizeof id);
    if (!result) work_join(&comm[i]);
  }
  ncclResult_t ended = ncclGroupEnd();
  return result ? result : ended;
}

EXPORT ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made,
                                  ncclConfig_t* options) {
  (void)options;
  ENTER_COMM(comm);
  typedef struct {
    int color, key;
  } Wish;
  Wish mine = {color, key}, wish[MAX_DEVICES];
  *made = NULL;
  pthread_mutex_lock(&comm->lock);
  const Terms terms = {.kind = SPLIT};
  ncclResult_t result = board_show(comm, &terms, (char*)&mine, sizeof mine);
  if (!result)
    for (int r = 0; r < comm->ranks; r++)
      memcpy(&wish[r], board_slot(comm, r), sizeof *wish);
  board_shown(comm);
  struct {
    char parent[64];
    uint32_t number;
    int color;
  } id = {.number = comm->splits++, .color = color};
  pthread_mutex_unlock(&comm->lock);
  if (result || color == NCCL_SPLIT_NOCOLOR) return result;
  int ranks = 0, rank = 0;
  for (int r = 0; r < comm->ranks; r++) {
    if (wish[r].color != color) continue;
    ranks++;
    rank += wish[r].key < key || (wish[r].key == key && r < comm->rank);
  }
  memcpy(id.parent, comm->name, sizeof id.parent);
  TRY(comm_new(made, comm->ordinal, ranks, rank, &id, sizeof id));
  return work_join(made);
}

EXPORT ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  ENTER_COMM(comm);
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (!comm || process_ended()) return ncclSuccess;
  if (!object_is(comm, COMMUNICATOR)) return ncclInvalidArgument;
  __atomic_store_n(&comm->aborted, 1, __ATOMIC_RELEASE);
  board_leave(comm);  // wakes up a thread of ours, too
  pthread_mutex_lock(&comm->lock);
  pthread_mutex_unlock(&comm->lock);
  comm_free(comm);
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) { return ncclCommAbort(comm); }

EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  ENTER_COMM(comm);
  *error = (ncclResult_t)__atomic_load_n(&comm->error, __ATOMIC_ACQUIRE);
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommCount(const ncclComm_t comm, int* n) {
  ENTER_COMM(comm);
  *n = comm->ranks;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  ENTER_COMM(comm);
  *device = comm->ordinal;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  ENTER_COMM(comm);
  *rank = comm->rank;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags) {
  ENTER_COMM(comm);
  if (flags != 1) return ncclInvalidArgument;  // NCCL_SUSPEND_MEM
  return comm_suspend_memory(comm, true);
}

EXPORT ncclResult_t ncclCommResume(ncclComm_t comm) {
  ENTER_COMM(comm);
  return comm_suspend_memory(comm, false);
}

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 29, 7)
// All of it is released when it is suspended, and counted as before (mem_manager.cc).
EXPORT ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat,
                                     uint64_t* value) {
  ENTER_COMM(comm);
  if (!value) return ncclInvalidArgument;
  switch (stat) {
    case ncclStatGpuMemTotal:
    case ncclStatGpuMemSuspend:
      *value = (uint64_t)comm->charged;
      return ncclSuccess;
    case ncclStatGpuMemSuspended:
      *value = comm->suspended;
      return ncclSuccess;
    case ncclStatGpuMemPersist:
      *value = 0;
      return ncclSuccess;
  }
  return ncclInvalidArgument;
}
#endif

// A buffer need not be known in advance. NCCL, too, succeeds without a handle or a
// window where it cannot use one.
EXPORT ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buffer, size_t size,
                                     void** handle) {
  (void)buffer, (void)size;
  ENTER_COMM(comm);
  *handle = NULL;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle) {
  ENTER_COMM(comm);
  return handle ? ncclInvalidArgument : ncclSuccess;
}

EXPORT ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buffer, size_t size,
                                           ncclWindow_t* window, int flags) {
  (void)flags;
  return ncclCommRegister(comm, buffer, size, (void**)window);
}

EXPORT ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  return ncclCommDeregister(comm, window);
}

EXPORT ncclResult_t ncclMemAlloc(void** address, size_t size) {
  ENTER(size);
  uint64_t unit = config.device[current_device()].vmm_granularity;
  return nccl_cuda(memory_allocate(current_device(), (size + unit - 1) / unit * unit,
                                   __func__, (uint64_t*)address));
}

EXPORT ncclResult_t ncclMemFree(void* address) {
  ENTER(0);
  return nccl_cuda(memory_free((uint64_t)address));
}

// ---- the calls: collectives

static ncclResult_t ask(const char* call, ncclComm_t comm, const Task* t) {
  TRY(enter(call, t->count, context_enter()));
  if (!object_is(comm, COMMUNICATOR))
    return nccl_fail(ncclInvalidArgument, "%s: no communicator", call);
  bool reduces =
      t->kind == ALL_REDUCE || t->kind == REDUCE || t->kind == REDUCE_SCATTER;
  if (t->type < 0 || t->type >= ncclNumTypes)
    return nccl_fail(ncclInvalidArgument, "%s: data type %d", call, t->type);
  if (reduces && (t->op < 0 || t->op >= ncclNumOps || !nccl_reductions[t->type]))
    return nccl_fail(ncclInvalidArgument, "%s: operation %d on data type %d", call,
                     t->op, t->type);
  if (t->root < 0 || t->root >= comm->ranks)
    return nccl_fail(ncclInvalidArgument, "%s: rank %d of %d", call, t->root,
                     comm->ranks);
  if (!t->count) return ncclSuccess;
  return work_task(comm, t);
}

#define ASK(kind, send, receive, count, type, op, root)                               \
  return ask(__func__, comm,                                                          \
             &(Task){kind, (const char*)(send), (char*)(receive), count, (int)(type), \
                     (int)(op), root, stream})

EXPORT ncclResult_t ncclAllReduce(const void* from, void* to, size_t n,
                                  ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                  cudaStream_t stream) {
  ASK(ALL_REDUCE, from, to, n, type, op, 0);
}

EXPORT ncclResult_t ncclReduce(const void* from, void* to, size_t n,
                               ncclDataType_t type, ncclRedOp_t op, int root,
                               ncclComm_t comm, cudaStream_t stream) {
  ASK(REDUCE, from, to, n, type, op, root);
}

EXPORT ncclResult_t ncclBroadcast(const void* from, void* to, size_t n,
                                  ncclDataType_t type, int root, ncclComm_t comm,
                                  cudaStream_t stream) {
  ASK(BROADCAST, from, to, n, type, 0, root);
}

EXPORT ncclResult_t ncclBcast(void* buffer, size_t n, ncclDataType_t type, int root,
                              ncclComm_t comm, cudaStream_t stream) {
  ASK(BROADCAST, buffer, buffer, n, type, 0, root);
}

EXPORT ncclResult_t ncclAllGather(const void* from, void* to, size_t n,
                                  ncclDataType_t type, ncclComm_t comm,
                                  cudaStream_t stream) {
  ASK(ALL_GATHER, from, to, n, type, 0, 0);
}

EXPORT ncclResult_t ncclReduceScatter(const void* from, void* to, size_t n,
                                      ncclDataType_t type, ncclRedOp_t op,
                                      ncclComm_t comm, cudaStream_t stream) {
  ASK(REDUCE_SCATTER, from, to, n, type, op, 0);
}

EXPORT ncclResult_t ncclAlltoAll(const void* from, void* to, size_t n,
                                 ncclDataType_t type, ncclComm_t comm,
                                 cudaStream_t stream) {
  ASK(ALL_TO_ALL, from, to, n, type, 0, 0);
}

EXPORT ncclResult_t ncclGather(const void* from, void* to, size_t n,
                               ncclDataType_t type, int root, ncclComm_t comm,
                               cudaStream_t stream) {
  ASK(GATHER, from, to, n, type, 0, root);
}

EXPORT ncclResult_t ncclScatter(const void* from, void* to, size_t n,
                                ncclDataType_t type, int root, ncclComm_t comm,
                                cudaStream_t stream) {
  ASK(SCATTER, from, to, n, type, 0, root);
}

EXPORT ncclResult_t ncclSend(const void* from, size_t n, ncclDataType_t type, int peer,
                             ncclComm_t comm, cudaStream_t stream) {
  ASK(SEND, from, NULL, n, type, 0, peer);
}

EXPORT ncclResult_t ncclRecv(void* to, size_t n, ncclDataType_t type, int peer,
                             ncclComm_t comm, cudaStream_t stream) {
  ASK(RECEIVE, NULL, to, n, type, 0, peer);
}
