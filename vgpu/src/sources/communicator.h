// NCCL's communicators: what their ranks share, and the tasks they are given.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

// nccl.h includes it and uses none of it; that of CUDA 12 is no C.
#define __CUDA_FP8_H__
#include <nccl.h>

#include "state/state.h"

enum { CHUNK = 256 << 10 };

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
  uint32_t connected;        // bits of Connection
  uint32_t sends, receives;  // bits of peers
  bool suspended;
  uint32_t aborted, error;
  char *zeros, *result;
  pthread_mutex_t lock;  // one batch at a time
  struct Batch* kept;    // graphs may launch it
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

#define TRY(action)                \
  do {                             \
    ncclResult_t tried = (action); \
    if (tried) return tried;       \
  } while (0)

// ---- nccl_errors.c

__attribute__((format(printf, 2, 3))) ncclResult_t nccl_fail(ncclResult_t result,
                                                             const char* format, ...);
ncclResult_t nccl_cuda(CUresult error);

// ---- nccl_reduce.c

size_t nccl_type_bytes(int type);
// None for fp8, which is only copied here.
typedef void Reduction(char* const*, int, size_t, int, char*);
extern Reduction* const nccl_reductions[ncclNumTypes];

// ---- nccl_board.c

ncclResult_t board_map(struct ncclComm* c, const char* path);
void board_leave(struct ncclComm* c);
void board_notify(struct ncclComm* c);
uint64_t board_read(const uint64_t* counter);
void board_count(struct ncclComm* c, uint64_t* counter);
Channel* board_channel(struct ncclComm* c, int from, int to);
char* board_slot(struct ncclComm* c, int rank);
char* board_channel_slot(struct ncclComm* c, int from, int to);

typedef bool Condition(struct ncclComm* c, uint64_t argument);

ncclResult_t board_wait(struct ncclComm* c, Condition* holds, uint64_t argument);
// Puts a chunk in memory that ranks share, unless it is known to be zeros.
ncclResult_t board_post(char* to, const char* from, size_t size, bool* zero);
ncclResult_t board_take(char* to, const char* from, size_t size, bool zero);
// Every rank shows the others a chunk (or NULL) and sees theirs, until it calls
// `board_shown`.
ncclResult_t board_show(struct ncclComm* c, const Terms* terms, const char* from,
                        size_t size);
void board_shown(struct ncclComm* c);

// ---- nccl_task.c

void batch_add(Batch* b, const Task* t);
ncclResult_t batch_launch(Batch* b);
void batch_free(Batch* b);

// ---- nccl_memory.c

// Memory of a communicator when it is made, and of a batch that is the first to connect
// in its way.
ncclResult_t comm_take_memory(struct ncclComm* c);
ncclResult_t comm_connect(struct ncclComm* c, const Batch* b);
void comm_give_memory(struct ncclComm* c);
ncclResult_t comm_suspend_memory(struct ncclComm* c, bool suspend);

// ---- nccl_comm.c

ncclResult_t comm_new(ncclComm_t* handle, int ordinal, int ranks, int rank,
                      const void* id, size_t id_bytes);
ncclResult_t comm_ready(ncclComm_t* handle);  // waits for its ranks
void comm_free(struct ncclComm* c);

// ---- nccl_group.c

ncclResult_t work_join(ncclComm_t* handle);
ncclResult_t work_task(ncclComm_t comm, const Task* task);
