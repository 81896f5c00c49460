// Communicators of NCCL: made, joined by their ranks, and freed.
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sources/communicator.h"
#include "state/objects.h"

static void board_name(char name[64], const void* id, size_t size) {
  uint64_t hash[2] = {0xcbf29ce484222325, 0x84222325cbf29ce4};
  for (size_t i = 0; i < size; i++)
    for (int h = 0; h < 2; h++)
      hash[h] = (hash[h] ^ ((const unsigned char*)id)[i]) * 0x100000001b3;
  snprintf(name, 64, "nccl-%016lx%016lx", hash[0], hash[1]);
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
    return nccl_fail(ncclInvalidUsage, "rank %d expects %d ranks, another one %u",
                     c->rank, c->ranks, none);
  Member* me = &board->member[c->rank];
  if (me->process.pid)
    return nccl_fail(ncclInvalidUsage, "two processes are rank %d", c->rank);
  me->device = c->device;
  me->process = process_id();
  ncclResult_t taken = comm_take_memory(c);
  if (taken) {
    board_leave(c);
    return taken;
  }
  if (__atomic_add_fetch(&board->joined, 1, __ATOMIC_ACQ_REL) == (uint32_t)c->ranks)
    unlink(path);
  board_notify(c);
  TRY(board_wait(c, all_joined, (uint64_t)c->ranks));
  for (int a = 0; a < c->ranks; a++)
    for (int b = 0; b < a; b++)
      if (board->member[a].device == board->member[b].device)
        return nccl_fail(
            ncclInvalidUsage,
            "Duplicate GPU detected : rank %d and rank %d both on CUDA device "
            "%s",
            b, a, config.device[board->member[a].device].pci);
  return ncclSuccess;
}

void comm_free(struct ncclComm* c) {
  board_leave(c);
  comm_give_memory(c);
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

ncclResult_t comm_new(ncclComm_t* handle, int ordinal, int ranks, int rank,
                      const void* id, size_t id_bytes) {
  *handle = NULL;
  if (ranks < 1 || rank < 0 || rank >= ranks || ranks > MAX_DEVICES)
    return nccl_fail(ncclInvalidArgument, "rank %d of %d; a run has %d devices at most",
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

ncclResult_t comm_ready(ncclComm_t* handle) {
  ncclResult_t result = comm_join(*handle);
  if (result) {
    comm_free(*handle);
    *handle = NULL;
  }
  return result;
}
