// A process of the run: it takes a slot of the shared state at its first CUDA call
// and keeps a file lock on it, so the kernel tells the others when it dies, however
// it dies.
#include "state/state.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "state/account.h"
#include "state/addresses.h"

static pthread_mutex_t init_lock = PTHREAD_MUTEX_INITIALIZER;
static enum { UNTRIED, READY, FAILED } init_state;
static bool started, forked, ended;
static char folder[512];

const char* run_folder(void) { return folder; }
bool forked_after_init(void) {
  started = !forked;
  return forked;
}
bool process_ended(void) { return ended; }

static struct flock slot_range(const Process* process, short type) {
  return (struct flock){.l_type = type,
                        .l_whence = SEEK_SET,
                        .l_start = process - shared->process + 1,
                        .l_len = 1};
}

static bool slot_is_dead(const Process* process) {
  if (!process->pid || process == self) return false;
  struct flock range = slot_range(process, F_WRLCK);
  return !fcntl(shared_file, F_GETLK, &range) && range.l_type == F_UNLCK;
}

ProcessId process_id(void) {
  return (ProcessId){self->pid, (int)(self - shared->process)};
}

bool process_is_dead(const ProcessId* id) {
  const Process* process = &shared->process[id->slot];
  return process->pid != id->pid || slot_is_dead(process);
}

static void slot_close(Process* process) {
  for (int d = 0; d < config.devices; d++) {
    if (!process->used[d]) continue;
    int64_t bytes = (int64_t)process->used[d];
    process->used[d] = 0;
    shared->device[d].used -= bytes;
    timeline_event(d, -bytes, "process end", process);
    process->used[d] = (uint64_t)bytes;  // the report shows its last memory
  }
  timeline_flush(process);
  report_write(process);
  memset(process, 0, offsetof(Process, timeline));
}

void state_reap(void) {
  for (int i = 0; i < MAX_PROCESSES; i++)
    if (slot_is_dead(&shared->process[i])) slot_close(&shared->process[i]);
}

static bool take_slot(void) {
  state_lock();
  state_reap();
  for (int i = 0; i < MAX_PROCESSES && !self; i++) {
    Process* process = &shared->process[i];
    if (process->pid) continue;
    struct flock range = slot_range(process, F_WRLCK);
    if (fcntl(shared_file, F_SETLK, &range)) continue;
    self = process;
    self->pid = getpid();
  }
  for (int d = 0; self && d < config.devices; d++)
    if (config.device[d].other && !shared->device[d].allocations)
      timeline_event(d, 0, "start", self);
  state_unlock();
  if (!self) message("more than %d processes use the device", MAX_PROCESSES);
  return self != NULL;
}

static void finish(void) {
  if (!self || self->pid != getpid()) return;
  if (pthread_mutex_trylock(&init_lock)) return;
  state_lock();
  for (int d = 0; d < config.devices; d++) available_now(d);  // while it is there
  Process* mine = self;
  self = NULL;
  slot_close(mine);
  state_unlock();
  struct flock range = slot_range(mine, F_UNLCK);
  fcntl(shared_file, F_SETLK, &range);
  init_state = FAILED;
  ended = true;
  pthread_mutex_unlock(&init_lock);
}

__attribute__((destructor)) static void at_exit(void) { finish(); }

// multiprocessing ends its forked children with _exit, which runs no destructor
EXPORT void _exit(int status) {
  finish();
  for (;;) syscall(SYS_exit_group, status);
}

static void after_fork_in_child(void) {
  // as CUDA: a child of a process that has called cuInit cannot use the driver;
  // NVML calls alone do no harm
  if (started) forked = true;
  self = NULL;
  init_state = UNTRIED;
  pthread_mutex_init(&init_lock, NULL);
  pthread_mutex_init(&memory_lock, NULL);
  shared_unmap();
}

__attribute__((constructor)) static void at_load(void) {
  pthread_atfork(NULL, NULL, after_fork_in_child);
}

bool state_init(void) {
  if (__atomic_load_n(&init_state, __ATOMIC_ACQUIRE) == READY) return true;
  pthread_mutex_lock(&init_lock);
  if (init_state == UNTRIED) {
    const char* run = getenv("VGPU_RUN");
    snprintf(folder, sizeof folder, "%s", run ? run : "");
    if (!run) message("no device: start the program with python -m vgpu");
    bool observer = getenv("VGPU_OBSERVER");
    bool ready = run && config_read(folder) && shared_map(folder) &&
                 (observer || (take_slot() && (forked || addresses_init())));
    if (ready) config_read_visible();
    __atomic_store_n(&init_state, ready ? READY : FAILED, __ATOMIC_RELEASE);
  }
  bool ready = init_state == READY;
  pthread_mutex_unlock(&init_lock);
  return ready;
}
