// NCCL: collectives between the processes of a run. Memory is real, so they move and
// reduce it.
//
// A communicator is a file in the run folder that its ranks map: a counter and a chunk
// of bytes each, and a chunk for each pair of them. All work is done when it is asked
// for, as on every stream here, so a collective waits for its peers where NCCL would
// have only queued it. A captured one is done when its graph is launched.
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

// nccl.h includes it and uses none of it; that of CUDA 12 is no C.
#define __CUDA_FP8_H__
#include <nccl.h>

#include "vgpu.h"

enum { CHUNK = 256 << 10, PATIENCE_MS = 20 };

typedef enum {
  ALL_REDUCE,
  REDUCE,
  BROADCAST,
  ALL_GATHER,
  GATHER,
  SCATTER,
  ALL_TO_ALL,
  REDUCE_SCATTER,
  SPLIT,
  SEND,
  RECEIVE,
} Collective;

typedef struct {
  Collective kind;
  const char* send;
  char* receive;
  size_t count;
  int type, op;
  int root;  // or the peer
  cudaStream_t stream;
} Task;

// What all ranks must agree on.
typedef struct {
  uint64_t count;
  int kind, type, op, root;
} Terms;

typedef struct {
  ProcessId process;
  int device;       // configured index
  uint32_t left;    // destroyed, aborted or failed
  uint64_t posted;  // chunks that lie in its slot for all to read
  uint64_t taken;   // chunks of all ranks that it has read
  bool zero;        // its chunk is zeros, and not in the slot
  Terms terms;
} Member;

typedef struct {
  uint64_t posted, taken, size;
  bool zero;
} Channel;

typedef struct {
  uint32_t activity;  // counts changes; ranks that wait sleep on it
  uint32_t ranks, joined;
  Member member[];  // and a Channel for each pair, and the chunks of both
} Board;

struct ncclComm {
  int rank, ranks, ordinal, device;
  char name[64];
  Board* board;
  size_t board_bytes;
  uint64_t step;
  uint32_t splits;
  int64_t charged;
  bool suspended;
  uint32_t aborted, error;
  char *zeros, *result;
  pthread_mutex_t lock;  // one batch at a time
  struct Batch* kept;    // what graphs may launch
};

// Tasks that are one kernel: of one communicator, in one group.
typedef struct Batch {
  struct ncclComm* comm;
  Task* task;
  size_t tasks, room;
  bool done;
  ncclResult_t result;
  struct Batch* next;
} Batch;

// ---- errors

static char last_error[512];

__attribute__((format(printf, 2, 3))) static ncclResult_t fail(ncclResult_t result,
                                                               const char* format,
                                                               ...) {
  va_list list;
  va_start(list, format);
  vsnprintf(last_error, sizeof last_error, format, list);
  va_end(list);
  message("NCCL: %s", last_error);
  return result;
}

EXPORT const char* ncclGetLastError(ncclComm_t comm) {
  (void)comm;
  return last_error;
}

EXPORT const char* ncclGetErrorString(ncclResult_t result) {
  static const char* const text[] = {"no error",
                                     "unhandled cuda error (run with NCCL_DEBUG=INFO "
                                     "for details)",
                                     "unhandled system error (run with NCCL_DEBUG=INFO "
                                     "for details)",
                                     "internal error - please report this issue to the "
                                     "NCCL developers",
                                     "invalid argument (run with NCCL_DEBUG=WARN for "
                                     "details)",
                                     "invalid usage (run with NCCL_DEBUG=WARN for "
                                     "details)",
                                     "remote process exited or there was a network "
                                     "error",
                                     "NCCL operation in progress"};
  bool known = result >= 0 && (size_t)result < sizeof text / sizeof *text;
  return known ? text[result] : "unknown result code";
}

static ncclResult_t enter(const char* call, uint64_t size, CUresult error) {
  if (error)
    return fail(ncclUnhandledCudaError, "%s: %s", call,
                cudaGetErrorString((cudaError_t)error));
  if (config.trace) message("%s(%lu)", call, size);
  int injection = injected(call, current_device(), size);
  return injection ? fail(injection, "%s: injected", call) : ncclSuccess;
}

#define TRY(action)                \
  do {                             \
    ncclResult_t tried = (action); \
    if (tried) return tried;       \
  } while (0)
#define ENTER(size) TRY(enter(__func__, (size), context_enter()))
// A communicator has its context: the thread that asks for it, as PyTorch's watchdog
// does, gets none on device 0.
#define ENTER_COMM(comm)                                            \
  do {                                                              \
    TRY(enter(__func__, 0, context_usable()));                      \
    if (!object_is(comm, COMMUNICATOR)) return ncclInvalidArgument; \
  } while (0)

// ---- data types

static size_t type_bytes(int type) {
  static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return bytes[type];
}

static float from_bf16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

static uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (value != value) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float from_half(uint16_t bits) {
  uint32_t sign = (uint32_t)(bits & 0x8000) << 16;
  uint32_t exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
  float value;
  if (exponent == 0) {
    value = (float)fraction / (1 << 24);
    return sign ? -value : value;
  }
  uint32_t wide = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
  memcpy(&value, &wide, 4);
  return value;
}

static uint16_t to_half(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  uint32_t size = bits & 0x7fffffff;
  if (size > 0x7f800000) return sign | 0x7e00;
  if (size >= 0x477ff000) return sign | 0x7c00;  // rounds to infinity
  if (size < 0x38800000) {                       // subnormal: in units of 2^-24
    float units = (value < 0 ? -value : value) * (1 << 24);
    uint32_t whole = (uint32_t)units;
    float rest = units - (float)whole;
    return sign | (uint16_t)(whole + (rest > 0.5f || (rest == 0.5f && whole & 1)));
  }
  size -= 112u << 23;
  return sign | (uint16_t)((size + 0xfff + (size >> 13 & 1)) >> 13);
}

#define SAME(x) (x)
// Sums and products in `wide`, rounded once; order of ranks.
#define REDUCTION(name, type, wide, load, store)                              \
  static void name(char* const* in, int n, size_t count, int op, char* out) { \
    for (size_t i = 0; i < count; i++) {                                      \
      wide all = load(((const type*)in[0])[i]);                               \
      for (int r = 1; r < n; r++) {                                           \
        wide one = load(((const type*)in[r])[i]);                             \
        all = op == ncclProd  ? (wide)(all * one)                             \
              : op == ncclMax ? (one > all ? one : all)                       \
              : op == ncclMin ? (one < all ? one : all)                       \
                              : (wide)(all + one);                            \
      }                                                                       \
      ((type*)out)[i] = (type)store(op == ncclAvg ? all / n : all);           \
    }                                                                         \
  }

#pragma GCC diagnostic ignored "-Wsign-compare"
REDUCTION(reduce_int8, int8_t, int32_t, SAME, SAME)
REDUCTION(reduce_uint8, uint8_t, uint32_t, SAME, SAME)
REDUCTION(reduce_int32, int32_t, int64_t, SAME, SAME)
REDUCTION(reduce_uint32, uint32_t, uint64_t, SAME, SAME)
REDUCTION(reduce_int64, int64_t, int64_t, SAME, SAME)
REDUCTION(reduce_uint64, uint64_t, uint64_t, SAME, SAME)
REDUCTION(reduce_half, uint16_t, float, from_half, to_half)
REDUCTION(reduce_float, float, float, SAME, SAME)
REDUCTION(reduce_double, double, double, SAME, SAME)
REDUCTION(reduce_bf16, uint16_t, float, from_bf16, to_bf16)

// None for fp8, which is only copied here.
typedef void Reduction(char* const*, int, size_t, int, char*);
static Reduction* const reductions[ncclNumTypes] = {
    reduce_int8,   reduce_uint8, reduce_int32, reduce_uint32, reduce_int64,
    reduce_uint64, reduce_half,  reduce_float, reduce_double, reduce_bf16};

// ---- what ranks share

static Channel* channel(struct ncclComm* c, int from, int to) {
  Channel* first = (Channel*)&c->board->member[c->ranks];
  return &first[from * c->ranks + to];
}

static char* chunks(struct ncclComm* c) {
  uint64_t end = (uint64_t)channel(c, c->ranks, 0);
  return (char*)((end + 4095) & ~4095ull);
}

static char* slot(struct ncclComm* c, int rank) {
  return chunks(c) + (size_t)rank * CHUNK;
}

static char* channel_slot(struct ncclComm* c, int from, int to) {
  return slot(c, c->ranks + from * c->ranks + to);
}

static size_t board_size(int ranks) {
  size_t n = (size_t)ranks;
  return sizeof(Board) + n * sizeof(Member) + n * n * sizeof(Channel) + 4096 +
         (n + n * n) * CHUNK;
}

static uint64_t read_counter(const uint64_t* counter) {
  return __atomic_load_n(counter, __ATOMIC_ACQUIRE);
}

static void notify(struct ncclComm* c) {
  __atomic_fetch_add(&c->board->activity, 1, __ATOMIC_RELEASE);
  syscall(SYS_futex, &c->board->activity, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static void count_up(struct ncclComm* c, uint64_t* counter) {
  __atomic_fetch_add(counter, 1, __ATOMIC_RELEASE);
  notify(c);
}

// A rank that can no longer take part: -1 if all can.
static int gone(struct ncclComm* c) {
  for (int r = 0; r < c->ranks; r++) {
    Member* m = &c->board->member[r];
    if (r == c->rank) continue;
    if (__atomic_load_n(&m->left, __ATOMIC_ACQUIRE)) return r;
    if (m->process.pid && process_is_dead(&m->process)) return r;
  }
  return -1;
}

typedef bool Condition(struct ncclComm* c, uint64_t argument);

static ncclResult_t wait_until(struct ncclComm* c, Condition* holds,
                               uint64_t argument) {
  const struct timespec patience = {.tv_nsec = PATIENCE_MS * 1000000};
  for (int lost = -1;;) {
    uint32_t seen = __atomic_load_n(&c->board->activity, __ATOMIC_ACQUIRE);
    if (holds(c, argument)) return ncclSuccess;
    if (__atomic_load_n(&c->aborted, __ATOMIC_ACQUIRE))
      return fail(ncclInternalError, "rank %d: the communicator was aborted", c->rank);
    if (lost >= 0)
      return fail(ncclRemoteError, "rank %d: rank %d is gone", c->rank, lost);
    long slept =
        syscall(SYS_futex, &c->board->activity, FUTEX_WAIT, seen, &patience, NULL, 0);
    if (slept && errno == ETIMEDOUT) lost = gone(c);
  }
}

static bool all_posted(struct ncclComm* c, uint64_t step) {
  for (int r = 0; r < c->ranks; r++)
    if (read_counter(&c->board->member[r].posted) < step) return false;
  return true;
}

static bool all_taken(struct ncclComm* c, uint64_t step) {
  for (int r = 0; r < c->ranks; r++)
    if (read_counter(&c->board->member[r].taken) < step) return false;
  return true;
}

static ncclResult_t cuda(CUresult error) {
  if (!error) return ncclSuccess;
  return fail(ncclUnhandledCudaError, "%s", cudaGetErrorString((cudaError_t)error));
}

// Puts a chunk in memory that ranks share, unless it is known to be zeros.
static ncclResult_t post(char* to, const char* from, size_t size, bool* zero) {
  *zero = from && memory_is_zero((uint64_t)from, size);
  if (!from || *zero) return ncclSuccess;
  return cuda(memory_copy((uint64_t)to, (uint64_t)from, size));
}

static ncclResult_t take(char* to, const char* from, size_t size, bool zero) {
  if (zero) return cuda(memory_fill((uint64_t)to, 0, 1, size));
  return cuda(memory_copy((uint64_t)to, (uint64_t)from, size));
}

// Every rank shows the others a chunk (or NULL) and sees theirs, until it calls
// `shown`.
static ncclResult_t show(struct ncclComm* c, const Terms* terms, const char* from,
                         size_t size) {
  Member* me = &c->board->member[c->rank];
  uint64_t step = ++c->step;
  TRY(wait_until(c, all_taken, step - 1));
  TRY(post(slot(c, c->rank), from, size, &me->zero));
  me->terms = *terms;
  count_up(c, &me->posted);
  TRY(wait_until(c, all_posted, step));
  for (int r = 0; r < c->ranks; r++)
    if (memcmp(&c->board->member[r].terms, terms, sizeof *terms))
      return fail(ncclInvalidUsage, "rank %d and rank %d call different collectives",
                  c->rank, r);
  return ncclSuccess;
}

static void shown(struct ncclComm* c) { count_up(c, &c->board->member[c->rank].taken); }

static ncclResult_t take_slot(struct ncclComm* c, int rank, char* to, size_t size) {
  return take(to, slot(c, rank), size, c->board->member[rank].zero);
}

static ncclResult_t reduce_slots(struct ncclComm* c, const Task* t, char* to,
                                 size_t size) {
  char* in[MAX_DEVICES];
  bool zero = true;
  for (int r = 0; r < c->ranks; r++) {
    bool is_zero = c->board->member[r].zero;
    in[r] = is_zero ? c->zeros : slot(c, r);
    zero &= is_zero;
  }
  if (!zero)
    reductions[t->type](in, c->ranks, size / type_bytes(t->type), t->op, c->result);
  return take(to, c->result, size, zero);
}

// ---- collectives

// `blocks` of the buffer that is shown, one after the other; who shows them and who
// takes them, and where to.
static ncclResult_t collective(struct ncclComm* c, const Task* t) {
  const size_t bytes = t->count * type_bytes(t->type);
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
      TRY(show(c, &terms, from ? from + at : NULL, size));
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
      shown(c);
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

static size_t task_bytes(const Task* t) { return t->count * type_bytes(t->type); }

static Channel* task_channel(struct ncclComm* c, const Task* t, char** chunk) {
  int from = t->kind == SEND ? c->rank : t->root;
  int to = t->kind == SEND ? t->root : c->rank;
  *chunk = channel_slot(c, from, to);
  return channel(c, from, to);
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
  bool full = read_counter(&way->posted) > read_counter(&way->taken);
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
    TRY(post(chunk, t->send + at, size, &way->zero));
    count_up(c, &way->posted);
  } else {
    if (way->size != task_bytes(t))
      return fail(ncclInvalidUsage, "rank %d sends %lu bytes, rank %d receives %lu",
                  t->root, way->size, c->rank, task_bytes(t));
    TRY(take(t->receive + at, chunk, size, way->zero));
    count_up(c, &way->taken);
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
    TRY(wait_until(p->batch->comm, any_moves, (uint64_t)p));
  }
}

// ---- batches

static void leave(struct ncclComm* c) {
  if (!c->board) return;
  __atomic_store_n(&c->board->member[c->rank].left, 1, __ATOMIC_RELEASE);
  notify(c);
}

static ncclResult_t batch_tasks(Batch* b) {
  Progress progress = {b, calloc(b->tasks, sizeof(size_t))};
  if (!progress.done) abort();
  ncclResult_t result = pairs(&progress);
  free(progress.done);
  for (size_t i = 0; i < b->tasks && !result; i++)
    if (!is_pair(&b->task[i])) result = collective(b->comm, &b->task[i]);
  return result;
}

CUresult collective_do(void* argument) {
  Batch* b = argument;
  if (!object_is(b, COLLECTIVE)) return CUDA_ERROR_INVALID_HANDLE;
  struct ncclComm* c = b->comm;
  if (self) __atomic_fetch_add(&self->kernels, 1, __ATOMIC_RELAXED);
  pthread_mutex_lock(&c->lock);
  b->done = true;
  b->result = c->error       ? (ncclResult_t)c->error
              : c->suspended ? fail(ncclInvalidUsage, "the communicator is suspended")
                             : batch_tasks(b);
  if (b->result && !c->error) {
    __atomic_store_n(&c->error, b->result, __ATOMIC_RELEASE);
    leave(c);  // peers see an error, too
  }
  pthread_mutex_unlock(&c->lock);
  return b->result ? CUDA_ERROR_LAUNCH_FAILED : CUDA_SUCCESS;
}

static void batch_free(Batch* b) {
  free(b->task);
  object_delete(b, COLLECTIVE);
}

static void batch_add(Batch* b, const Task* t) {
  if (b->tasks == b->room) {
    b->room = b->room ? 2 * b->room : 4;
    b->task = realloc(b->task, b->room * sizeof *b->task);
    if (!b->task) abort();
  }
  b->task[b->tasks++] = *t;
}

// Does it now, or when the graph is launched that its stream captures.
static ncclResult_t batch_launch(Batch* b) {
  Operation o = {.kind = NODE_COLLECTIVE, .argument = b};
  CUresult error = stream_run(b->task[0].stream, &o);
  ncclResult_t result = b->done ? b->result : cuda(error);
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

// ---- communicators

static void board_name(char name[64], const void* id, size_t size) {
  uint64_t hash[2] = {0xcbf29ce484222325, 0x84222325cbf29ce4};
  for (size_t i = 0; i < size; i++)
    for (int h = 0; h < 2; h++)
      hash[h] = (hash[h] ^ ((const unsigned char*)id)[i]) * 0x100000001b3;
  snprintf(name, 64, "nccl-%016lx%016lx", hash[0], hash[1]);
}

static ncclResult_t board_map(struct ncclComm* c, const char* path) {
  c->board_bytes = board_size(c->ranks);
  int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, (off_t)c->board_bytes)) {
    if (file >= 0) close(file);
    return fail(ncclSystemError, "%s: %s", path, strerror(errno));
  }
  void* start = mmap(NULL, c->board_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (start == MAP_FAILED)
    return fail(ncclSystemError, "cannot map %s: %s", path, strerror(errno));
  c->board = start;
  return ncclSuccess;
}

static bool all_joined(struct ncclComm* c, uint64_t ranks) {
  return __atomic_load_n(&c->board->joined, __ATOMIC_ACQUIRE) == ranks;
}

static ncclResult_t comm_join(struct ncclComm* c) {
  char path[700];
  snprintf(path, sizeof path, "%s/%s", run_folder(), c->name);
  TRY(board_map(c, path));
  Board* board = c->board;
  uint32_t none = 0;
  if (!__atomic_compare_exchange_n(&board->ranks, &none, c->ranks, false,
                                   __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE) &&
      none != (uint32_t)c->ranks)
    return fail(ncclInvalidUsage, "rank %d expects %d ranks, another one %u", c->rank,
                c->ranks, none);
  Member* me = &board->member[c->rank];
  if (me->process.pid)
    return fail(ncclInvalidUsage, "two processes are rank %d", c->rank);
  me->device = c->device;
  me->process = process_id();
  int64_t bytes = (int64_t)config.device[c->device].nccl_communicator;
  if (!charge(c->device, bytes, "nccl")) {
    leave(c);
    return fail(ncclUnhandledCudaError, "Failed to CUDA calloc %ld bytes", bytes);
  }
  c->charged = bytes;
  if (__atomic_add_fetch(&board->joined, 1, __ATOMIC_ACQ_REL) == (uint32_t)c->ranks)
    unlink(path);
  notify(c);
  TRY(wait_until(c, all_joined, (uint64_t)c->ranks));
  for (int a = 0; a < c->ranks; a++)
    for (int b = 0; b < a; b++)
      if (board->member[a].device == board->member[b].device)
        return fail(ncclInvalidUsage,
                    "Duplicate GPU detected : rank %d and rank %d both on CUDA device "
                    "%s",
                    b, a, config.device[board->member[a].device].pci);
  return ncclSuccess;
}

static void comm_free(struct ncclComm* c) {
  leave(c);
  if (!c->suspended) charge(c->device, -c->charged, "nccl");
  if (c->board) munmap(c->board, c->board_bytes);
  for (Batch *b = c->kept, *next; b; b = next) {
    next = b->next;
    batch_free(b);
  }
  free(c->zeros);
  free(c->result);
  pthread_mutex_destroy(&c->lock);
  object_delete(c, COMMUNICATOR);
}

static ncclResult_t comm_new(ncclComm_t* handle, int ordinal, int ranks, int rank,
                             const void* id, size_t id_bytes) {
  *handle = NULL;
  if (ranks < 1 || rank < 0 || rank >= ranks || ranks > MAX_DEVICES)
    return fail(ncclInvalidArgument, "rank %d of %d; a run has %d devices at most",
                rank, ranks, MAX_DEVICES);
  struct ncclComm* c = object_new(COMMUNICATOR, sizeof *c);
  c->rank = rank;
  c->ranks = ranks;
  c->ordinal = ordinal;
  c->device = device_index(ordinal);
  c->zeros = calloc(1, CHUNK);
  c->result = malloc(CHUNK);
  if (!c->zeros || !c->result) abort();
  pthread_mutex_init(&c->lock, NULL);
  board_name(c->name, id, id_bytes);
  *handle = c;
  return ncclSuccess;
}

static ncclResult_t comm_ready(ncclComm_t* handle) {
  ncclResult_t result = comm_join(*handle);
  if (result) {
    comm_free(*handle);
    *handle = NULL;
  }
  return result;
}

// ---- groups: what a thread collects between start and end

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

static ncclResult_t work_join(ncclComm_t* handle) {
  work_add(*handle)->joins = handle;
  return depth ? ncclSuccess : group_end();
}

static ncclResult_t work_task(ncclComm_t comm, const Task* task) {
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
  if (!depth) return fail(ncclInvalidUsage, "ncclGroupEnd: not in a group call");
  return --depth ? ncclSuccess : group_end();
}

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
  return n == 32 ? ncclSuccess : fail(ncclSystemError, "getrandom");
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
  depth++;
  ncclResult_t result = ncclSuccess;
  for (int i = 0; i < n && !result; i++) {
    int ordinal = ordinals ? ordinals[i] : i;
    if (ordinal < 0 || ordinal >= visible_devices())
      result = fail(ncclInvalidArgument, "there is no device %d", ordinal);
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
  ncclResult_t result = show(comm, &terms, (char*)&mine, sizeof mine);
  if (!result)
    for (int r = 0; r < comm->ranks; r++) memcpy(&wish[r], slot(comm, r), sizeof *wish);
  shown(comm);
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
  leave(comm);  // wakes up a thread of ours, too
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
  if (!comm->suspended) charge(comm->device, -comm->charged, "nccl");
  comm->suspended = true;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommResume(ncclComm_t comm) {
  ENTER_COMM(comm);
  if (comm->suspended && !charge(comm->device, comm->charged, "nccl"))
    return fail(ncclUnhandledCudaError, "Failed to CUDA calloc %ld bytes",
                comm->charged);
  comm->suspended = false;
  return ncclSuccess;
}

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
  return cuda(memory_allocate(current_device(), (size + unit - 1) / unit * unit,
                              __func__, (uint64_t*)address));
}

EXPORT ncclResult_t ncclMemFree(void* address) {
  ENTER(0);
  return cuda(memory_free((uint64_t)address));
}

// ---- the calls: collectives

static ncclResult_t ask(const char* call, ncclComm_t comm, const Task* t) {
  TRY(enter(call, t->count, context_enter()));
  if (!object_is(comm, COMMUNICATOR))
    return fail(ncclInvalidArgument, "%s: no communicator", call);
  bool reduces =
      t->kind == ALL_REDUCE || t->kind == REDUCE || t->kind == REDUCE_SCATTER;
  if (t->type < 0 || t->type >= ncclNumTypes)
    return fail(ncclInvalidArgument, "%s: data type %d", call, t->type);
  if (reduces && (t->op < 0 || t->op >= ncclNumOps || !reductions[t->type]))
    return fail(ncclInvalidArgument, "%s: operation %d on data type %d", call, t->op,
                t->type);
  if (t->root < 0 || t->root >= comm->ranks)
    return fail(ncclInvalidArgument, "%s: rank %d of %d", call, t->root, comm->ranks);
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
