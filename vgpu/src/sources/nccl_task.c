// Tasks of NCCL: collectives, sends and receives. All work is done when it is asked
// for, as on every stream here, so a collective waits for its peers where NCCL would
// have only queued it. A captured one is done when its graph is launched.
#include <stdlib.h>

#include "sources/communicator.h"
#include "state/objects.h"
#include "streams/stream.h"

// ---- collectives

static ncclResult_t take_slot(struct ncclComm* c, int rank, char* to, size_t size) {
  return board_take(to, board_slot(c, rank), size, c->board->member[rank].zero);
}

static ncclResult_t reduce_slots(struct ncclComm* c, const Task* t, char* to,
                                 size_t size) {
  char* in[MAX_DEVICES];
  bool zero = true;
  for (int r = 0; r < c->ranks; r++) {
    bool is_zero = c->board->member[r].zero;
    in[r] = is_zero ? c->zeros : board_slot(c, r);
    zero &= is_zero;
  }
  if (!zero)
    nccl_reductions[t->type](in, c->ranks, size / nccl_type_bytes(t->type), t->op,
                             c->result);
  return board_take(to, c->result, size, zero);
}

// `blocks` of the buffer that is shown, one after the other; who shows them and who
// takes them, and where to.
static ncclResult_t collective(struct ncclComm* c, const Task* t) {
  const size_t bytes = t->count * nccl_type_bytes(t->type);
  const Terms terms = {t->count, t->kind, t->type, t->op, t->root};
  const int kind = t->kind;
  const bool root = c->rank == t->root;
  const bool spread = kind == REDUCE_SCATTER || kind == ALL_TO_ALL || kind == SCATTER;
  const bool shows = root || (kind != BROADCAST && kind != SCATTER);
  for (int block = 0; block < (spread ? c->ranks : 1); block++) {
    const char* from = shows ? t->send + block * bytes : NULL;
    const bool takes = spread                             ? c->rank == block
                       : kind == REDUCE || kind == GATHER ? root
                                                          : true;
    for (size_t at = 0; at < bytes; at += CHUNK) {
      size_t size = MIN((size_t)CHUNK, bytes - at);
      TRY(board_show(c, &terms, from ? from + at : NULL, size));
      char* to = takes ? t->receive + at : NULL;
      if (!to) {
        // nothing for this rank
      } else if (kind == ALL_REDUCE || kind == REDUCE || kind == REDUCE_SCATTER) {
        TRY(reduce_slots(c, t, to, size));
      } else if (kind == BROADCAST || kind == SCATTER) {
        TRY(take_slot(c, t->root, to, size));
      } else {
        for (int r = 0; r < c->ranks; r++) TRY(take_slot(c, r, to + r * bytes, size));
      }
      board_shown(c);
    }
  }
  return ncclSuccess;
}

// ---- sends and receives of a group: all of them at once

typedef struct {
  const Batch* batch;
  size_t* done;  // bytes of each task
} Progress;

static bool is_pair(const Task* t) { return t->kind == SEND || t->kind == RECEIVE; }

static size_t task_bytes(const Task* t) { return t->count * nccl_type_bytes(t->type); }

static Channel* task_channel(struct ncclComm* c, const Task* t, char** chunk) {
  int from = t->kind == SEND ? c->rank : t->root;
  int to = t->kind == SEND ? t->root : c->rank;
  *chunk = board_channel_slot(c, from, to);
  return board_channel(c, from, to);
}

// Its turn: an earlier task of the same pair and direction comes first.
static bool may_move(const Progress* p, size_t index) {
  const Task* t = &p->batch->task[index];
  if (!is_pair(t) || p->done[index] == task_bytes(t)) return false;
  for (size_t i = 0; i < index; i++) {
    const Task* before = &p->batch->task[i];
    if (before->kind == t->kind && before->root == t->root &&
        p->done[i] < task_bytes(before))
      return false;
  }
  char* chunk;
  const Channel* way = task_channel(p->batch->comm, t, &chunk);
  bool full = board_read(&way->posted) > board_read(&way->taken);
  return t->kind == SEND ? !full : full;
}

static bool any_moves(struct ncclComm* c, uint64_t argument) {
  (void)c;
  const Progress* p = (const Progress*)argument;
  bool unfinished = false;
  for (size_t i = 0; i < p->batch->tasks; i++) {
    if (may_move(p, i)) return true;
    unfinished |=
        is_pair(&p->batch->task[i]) && p->done[i] < task_bytes(&p->batch->task[i]);
  }
  return !unfinished;
}

static ncclResult_t move_chunk(const Progress* p, size_t index) {
  struct ncclComm* c = p->batch->comm;
  const Task* t = &p->batch->task[index];
  size_t at = p->done[index], size = MIN((size_t)CHUNK, task_bytes(t) - at);
  char* chunk;
  Channel* way = task_channel(c, t, &chunk);
  if (t->kind == SEND) {
    way->size = task_bytes(t);
    TRY(board_post(chunk, t->send + at, size, &way->zero));
    board_count(c, &way->posted);
  } else {
    if (way->size != task_bytes(t))
      return nccl_fail(ncclInvalidUsage,
                       "rank %d sends %lu bytes, rank %d receives %lu", t->root,
                       way->size, c->rank, task_bytes(t));
    TRY(board_take(t->receive + at, chunk, size, way->zero));
    board_count(c, &way->taken);
  }
  p->done[index] += size;
  return ncclSuccess;
}

static ncclResult_t pairs(const Progress* p) {
  for (;;) {
    bool moved = false;
    for (size_t i = 0; i < p->batch->tasks; i++) {
      if (!may_move(p, i)) continue;
      TRY(move_chunk(p, i));
      moved = true;
    }
    if (moved) continue;
    bool unfinished = false;
    for (size_t i = 0; i < p->batch->tasks; i++)
      unfinished |=
          is_pair(&p->batch->task[i]) && p->done[i] < task_bytes(&p->batch->task[i]);
    if (!unfinished) return ncclSuccess;
    TRY(board_wait(p->batch->comm, any_moves, (uint64_t)p));
  }
}

// ---- batches

static ncclResult_t batch_tasks(Batch* b) {
  Progress progress = {b, calloc(b->tasks, sizeof(size_t))};
  if (!progress.done) abort();
  ncclResult_t result = pairs(&progress);
  free(progress.done);
  for (size_t i = 0; i < b->tasks && !result; i++)
    if (!is_pair(&b->task[i])) result = collective(b->comm, &b->task[i]);
  return result;
}

static CUresult collective_do(void* argument) {
  Batch* b = argument;
  if (!object_is(b, COLLECTIVE)) return CUDA_ERROR_INVALID_HANDLE;
  struct ncclComm* c = b->comm;
  if (self) __atomic_fetch_add(&self->kernels, 1, __ATOMIC_RELAXED);
  pthread_mutex_lock(&c->lock);
  b->done = true;
  b->result = c->error ? (ncclResult_t)c->error
              : c->suspended
                  ? nccl_fail(ncclInvalidUsage, "the communicator is suspended")
                  : batch_tasks(b);
  if (b->result && !c->error) {
    __atomic_store_n(&c->error, b->result, __ATOMIC_RELEASE);
    board_leave(c);  // peers see an error, too
  }
  pthread_mutex_unlock(&c->lock);
  return b->result ? CUDA_ERROR_LAUNCH_FAILED : CUDA_SUCCESS;
}

void batch_free(Batch* b) {
  free(b->task);
  object_delete(b, COLLECTIVE);
}

void batch_add(Batch* b, const Task* t) {
  if (b->tasks == b->room) {
    b->room = b->room ? 2 * b->room : 4;
    b->task = realloc(b->task, b->room * sizeof *b->task);
    if (!b->task) abort();
  }
  b->task[b->tasks++] = *t;
}

// Does it now, or when the graph is launched that its stream captures.
ncclResult_t batch_launch(Batch* b) {
  ncclResult_t connected = comm_connect(b->comm, b);
  if (connected) {
    batch_free(b);
    return connected;
  }
  Operation o = {.kind = NODE_COLLECTIVE, .call = collective_do, .argument = b};
  CUresult error = stream_run(b->task[0].stream, &o);
  ncclResult_t result = b->done ? b->result : nccl_cuda(error);
  if (b->done || error) {
    batch_free(b);
  } else {
    pthread_mutex_lock(&b->comm->lock);
    b->next = b->comm->kept;
    b->comm->kept = b;
    pthread_mutex_unlock(&b->comm->lock);
  }
  return result;
}
