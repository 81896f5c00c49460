// What the ranks of a communicator share: a file in the run folder that they map, a
// counter and a chunk of bytes each, and a chunk for each pair of them.
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "memory/memory.h"
#include "sources/communicator.h"

enum { PATIENCE_MS = 20 };

Channel* board_channel(struct ncclComm* c, int from, int to) {
  Channel* first = (Channel*)&c->board->member[c->ranks];
  return &first[from * c->ranks + to];
}

static char* chunks(struct ncclComm* c) {
  uint64_t end = (uint64_t)board_channel(c, c->ranks, 0);
  return (char*)((end + 4095) & ~4095ull);
}

char* board_slot(struct ncclComm* c, int rank) {
  return chunks(c) + (size_t)rank * CHUNK;
}

char* board_channel_slot(struct ncclComm* c, int from, int to) {
  return board_slot(c, c->ranks + from * c->ranks + to);
}

static size_t board_size(int ranks) {
  size_t n = (size_t)ranks;
  return sizeof(Board) + n * sizeof(Member) + n * n * sizeof(Channel) + 4096 +
         (n + n * n) * CHUNK;
}

uint64_t board_read(const uint64_t* counter) {
  return __atomic_load_n(counter, __ATOMIC_ACQUIRE);
}

void board_notify(struct ncclComm* c) {
  __atomic_fetch_add(&c->board->activity, 1, __ATOMIC_RELEASE);
  syscall(SYS_futex, &c->board->activity, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

void board_count(struct ncclComm* c, uint64_t* counter) {
  __atomic_fetch_add(counter, 1, __ATOMIC_RELEASE);
  board_notify(c);
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

ncclResult_t board_wait(struct ncclComm* c, Condition* holds, uint64_t argument) {
  const struct timespec patience = {.tv_nsec = PATIENCE_MS * 1000000};
  for (int lost = -1;;) {
    uint32_t seen = __atomic_load_n(&c->board->activity, __ATOMIC_ACQUIRE);
    if (holds(c, argument)) return ncclSuccess;
    if (__atomic_load_n(&c->aborted, __ATOMIC_ACQUIRE))
      return nccl_fail(ncclInternalError, "rank %d: the communicator was aborted",
                       c->rank);
    if (lost >= 0)
      return nccl_fail(ncclRemoteError, "rank %d: rank %d is gone", c->rank, lost);
    long slept =
        syscall(SYS_futex, &c->board->activity, FUTEX_WAIT, seen, &patience, NULL, 0);
    if (slept && errno == ETIMEDOUT) lost = gone(c);
  }
}

static bool all_posted(struct ncclComm* c, uint64_t step) {
  for (int r = 0; r < c->ranks; r++)
    if (board_read(&c->board->member[r].posted) < step) return false;
  return true;
}

static bool all_taken(struct ncclComm* c, uint64_t step) {
  for (int r = 0; r < c->ranks; r++)
    if (board_read(&c->board->member[r].taken) < step) return false;
  return true;
}

ncclResult_t board_post(char* to, const char* from, size_t size, bool* zero) {
  *zero = from && memory_is_zero((uint64_t)from, size);
  if (!from || *zero) return ncclSuccess;
  return nccl_cuda(memory_copy((uint64_t)to, (uint64_t)from, size));
}

ncclResult_t board_take(char* to, const char* from, size_t size, bool zero) {
  if (zero) return nccl_cuda(memory_fill((uint64_t)to, 0, 1, size));
  return nccl_cuda(memory_copy((uint64_t)to, (uint64_t)from, size));
}

ncclResult_t board_show(struct ncclComm* c, const Terms* terms, const char* from,
                        size_t size) {
  Member* me = &c->board->member[c->rank];
  uint64_t step = ++c->step;
  TRY(board_wait(c, all_taken, step - 1));
  TRY(board_post(board_slot(c, c->rank), from, size, &me->zero));
  me->terms = *terms;
  board_count(c, &me->posted);
  TRY(board_wait(c, all_posted, step));
  for (int r = 0; r < c->ranks; r++)
    if (memcmp(&c->board->member[r].terms, terms, sizeof *terms))
      return nccl_fail(ncclInvalidUsage,
                       "rank %d and rank %d call different collectives", c->rank, r);
  return ncclSuccess;
}

void board_shown(struct ncclComm* c) {
  board_count(c, &c->board->member[c->rank].taken);
}

void board_leave(struct ncclComm* c) {
  if (!c->board) return;
  __atomic_store_n(&c->board->member[c->rank].left, 1, __ATOMIC_RELEASE);
  board_notify(c);
}

ncclResult_t board_map(struct ncclComm* c, const char* path) {
  c->board_bytes = board_size(c->ranks);
  int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, (off_t)c->board_bytes)) {
    if (file >= 0) close(file);
    return nccl_fail(ncclSystemError, "%s: %s", path, strerror(errno));
  }
  void* start = mmap(NULL, c->board_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (start == MAP_FAILED)
    return nccl_fail(ncclSystemError, "cannot map %s: %s", path, strerror(errno));
  c->board = start;
  return ncclSuccess;
}
