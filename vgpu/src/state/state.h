// What all processes of a run share, and this process's part of it.
//
// Locks, in the order they may be taken:
//   objects_lock  objects, captures                  (objects.c)
//   memory_lock   addresses and physical memory      (addresses.c)
//   state_lock    the state all processes share      (shared.c)
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include "state/config.h"

typedef struct {
  char call[NAME_BYTES];
  int device;      // -1: any
  uint64_t nth;    // 0: any
  uint64_t over;   // only requests larger than this
  uint64_t times;  // how often it may still fire
  int error;
  uint64_t seen, fired;
} Rule;

typedef struct {
  int device;
  int64_t bytes;              // positive: another process takes, negative: gives
  uint64_t at_allocation;     // 0: not by count
  char at_phase[NAME_BYTES];  // empty: not by phase
  bool done;
} Move;

typedef struct {
  char name[NAME_BYTES];
  int open;
  int before;  // the phase it opened in, -1: none
  uint64_t peak[MAX_DEVICES];
} Phase;

typedef struct {
  pid_t pid;  // 0: free
  uint64_t used[MAX_DEVICES], peak[MAX_DEVICES];
  uint64_t phase_peak[MAX_PHASES][MAX_DEVICES];
  uint32_t contexts;             // a bit for each device that it has one on
  uint32_t hosts;                // whose plain memory it takes, if they are integrated
  uint64_t pinned, pinned_peak;  // bytes of host memory
  uint64_t kernels, computed, graph_launches;
  uint32_t fired[MAX_RULES];
  uint32_t calls[MAX_CALLS];
  char late_call[MAX_LATE_CALLS][NAME_BYTES];
  uint32_t late_calls[MAX_LATE_CALLS];
  uint32_t timeline_bytes;
  char timeline[TIMELINE_BYTES];
} Process;

typedef struct Shared {
  pthread_mutex_t lock;
  struct {
    uint64_t used;  // by all processes of the run
    uint64_t other, peak, allocations;
    uint64_t least_available;
  } device[MAX_DEVICES];
  int phases;
  int phase_now;  // index of the one opened last, -1: none
  Phase phase[MAX_PHASES];
  int rules, moves;
  Rule rule[MAX_RULES];
  Move move[MAX_MOVES];
  Process process[MAX_PROCESSES];
} Shared;

// ---- shared.c

extern Shared* shared;
extern Process* self;
extern int shared_file;  // -1: not open

bool shared_map(const char* folder);  // false, and it says why: none
void shared_unmap(void);
void state_lock(void);
void state_unlock(void);

// ---- files.c

extern int (*open_meminfo)(void);  // of the device's host; -1: the real one

// ---- state.c

bool state_init(void);  // false: no run folder, or no device in it
// Gives back what processes that died still hold. Under the state lock.
void state_reap(void);
const char* run_folder(void);
bool forked_after_init(void);
bool process_ended(void);

// A process of the run, also after it has ended.
typedef struct {
  pid_t pid;
  int slot;
} ProcessId;

ProcessId process_id(void);  // this one
bool process_is_dead(const ProcessId* id);
