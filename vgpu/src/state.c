// The run: its configuration, and the memory all its processes share.
//
// The run folder, named by VGPU_RUN, holds `config` (lines "key value", written
// and checked by the launcher) and `state`, mapped by every process. A process
// takes a slot there at its first CUDA call and keeps a file lock on it, so the
// kernel tells the others when it dies, however it dies.
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "vgpu.h"

Config config;
Shared* shared;
Process* self;

static pthread_mutex_t init_lock = PTHREAD_MUTEX_INITIALIZER;
static enum { UNTRIED, READY, FAILED } init_state;
static bool started, forked, ended;
static int state_file = -1;
static char folder[512];
static int visible[MAX_DEVICES], visible_count;

void message(const char* format, ...) {
  char line[1024];
  int n = snprintf(line, sizeof line, "[vgpu] pid %d: ", getpid());
  va_list list;
  va_start(list, format);
  n += vsnprintf(line + n, sizeof line - n - 1, format, list);
  va_end(list);
  n = MIN(n, (int)sizeof line - 2);
  line[n++] = '\n';
  if (write(2, line, n) < 0) return;
}

const char* run_folder(void) { return folder; }
bool forked_after_init(void) {
  started = !forked;
  return forked;
}
bool process_ended(void) { return ended; }
int visible_devices(void) { return visible_count; }
int device_index(int ordinal) { return visible[ordinal]; }

// ---- configuration

static char* config_text;

static const char* setting(const char* key) {
  size_t n = strlen(key);
  for (char* line = config_text; line; line = strchr(line, '\n')) {
    if (*line == '\n') line++;
    if (!strncmp(line, key, n) && line[n] == ' ') return line + n + 1;
  }
  return NULL;
}

static uint64_t number(const char* key) {
  const char* text = setting(key);
  return text ? strtoull(text, NULL, 0) : 0;
}

static void text(const char* key, char* to, size_t size) {
  const char* from = setting(key);
  size_t n = from ? strcspn(from, "\n") : 0;
  n = MIN(n, size - 1);
  if (n) memcpy(to, from, n);
  to[n] = 0;
}

static char* device_key(int device, const char* key) {
  static char full[128];  // only under init_lock
  snprintf(full, sizeof full, "%d.%s", device, key);
  return full;
}

static void read_device(int i, DeviceConfig* d) {
#define NUMBER(field) d->field = number(device_key(i, #field))
#define TEXT(field) text(device_key(i, #field), d->field, sizeof d->field)
  NUMBER(memory);
  NUMBER(meminfo_total);
  NUMBER(meminfo_free_limit);
  NUMBER(meminfo_free_stale);
  NUMBER(nvml_own_use);
  NUMBER(mps);
  NUMBER(properties_total);
  NUMBER(nvml_total);
  NUMBER(other);
  NUMBER(context);
  NUMBER(graph);
  NUMBER(graph_node);
  NUMBER(first_graph);
  NUMBER(cublas_handle);
  NUMBER(module);
  NUMBER(kernel);
  NUMBER(nccl_communicator);
  NUMBER(malloc_block);
  NUMBER(vmm_granularity);
  NUMBER(integrated);
  NUMBER(vmm_handle_offset);
  NUMBER(major);
  NUMBER(minor);
  NUMBER(sm_count);
  NUMBER(clock_khz);
  NUMBER(memory_clock_khz);
  NUMBER(bus_bits);
  NUMBER(l2_bytes);
  NUMBER(shared_optin);
  NUMBER(shared_per_sm);
  NUMBER(mig_parent_total);
  TEXT(name);
  TEXT(uuid);
  TEXT(pci);
  TEXT(mig_uuid);
#undef NUMBER
#undef TEXT
}

static bool read_config(void) {
  char path[600];
  snprintf(path, sizeof path, "%s/config", folder);
  FILE* file = fopen(path, "r");
  if (!file) {
    message("cannot read %s: %s", path, strerror(errno));
    return false;
  }
  size_t room = 1 << 20;
  free(config_text);  // of the process that this one was forked from
  memset(&config, 0, sizeof config);
  config_text = malloc(room);
  size_t n = fread(config_text, 1, room - 1, file);
  config_text[n] = 0;
  fclose(file);
  config.devices = MIN((int)number("devices"), MAX_DEVICES);
  config.strict = number("strict");
  config.trace = number("trace");
  config.driver_version = (int)number("driver_version");
  config.synchronize_us = (int)number("synchronize_us");
  text("timeline", config.timeline, sizeof config.timeline);
  text("report", config.report, sizeof config.report);
  for (int i = 0; i < config.devices; i++) read_device(i, &config.device[i]);
  char line[512], key[32];
  for (int i = 0; i < 64; i++) {
    snprintf(key, sizeof key, "nvml_error.%d", i);
    text(key, line, sizeof line);
    NvmlError* e = &config.nvml_error[i];
    if (sscanf(line, "%95s %d %d %d", e->call, &e->device, &e->parent, &e->error) != 4)
      break;
    config.nvml_errors = i + 1;
  }
  for (int i = 0; i < MAX_HOOKS; i++) {
    snprintf(key, sizeof key, "hook.%d", i);
    text(key, line, sizeof line);
    Hook* h = &config.hook[i];
    if (sscanf(line, "%95s %d %lu %lu %d %d", h->kernel, &h->argument, &h->bytes,
               &h->value, &h->value_bytes, &h->count_argument) != 6)
      break;
    config.hooks = i + 1;
  }
  return true;
}

static void read_rules(void) {
  char key[32], line[512];
  for (int i = 0; i < MAX_RULES; i++) {
    snprintf(key, sizeof key, "inject.%d", i);
    text(key, line, sizeof line);
    Rule r = {0};
    if (sscanf(line, "%95s %d %lu %lu %lu %d", r.call, &r.device, &r.nth, &r.over,
               &r.times, &r.error) != 6)
      break;
    shared->rule[shared->rules++] = r;
  }
  for (int i = 0; i < MAX_MOVES; i++) {
    snprintf(key, sizeof key, "move.%d", i);
    text(key, line, sizeof line);
    Move m = {0};
    if (sscanf(line, "%d %ld %lu %95s", &m.device, &m.bytes, &m.at_allocation,
               m.at_phase) < 3)
      break;
    shared->move[shared->moves++] = m;
  }
}

// ---- CUDA_VISIBLE_DEVICES: indices or the start of a GPU's or MIG's UUID

static int visible_match(const char* item, size_t n) {
  char* end;
  long index = strtol(item, &end, 10);
  if (n && end == item + n) return index < config.devices ? (int)index : -1;
  for (int i = 0; n > 4 && i < config.devices; i++) {
    const DeviceConfig* d = &config.device[i];
    if (!strncmp(d->uuid, item, n) || !strncmp(d->mig_uuid, item, n)) return i;
  }
  return -1;
}

static void read_visible(void) {
  const char* list = getenv("CUDA_VISIBLE_DEVICES");
  visible_count = 0;
  if (!list) {
    for (int i = 0; i < config.devices; i++) visible[visible_count++] = i;
    return;
  }
  while (*list && visible_count < MAX_DEVICES) {
    size_t n = strcspn(list, ",");
    int match = visible_match(list, n);
    if (match < 0) break;  // as CUDA: what follows an invalid entry is invisible
    visible[visible_count++] = match;
    list += n;
    if (*list) list++;
  }
}

// ---- the shared state

static void recount(void) {
  for (int d = 0; d < config.devices; d++) {
    uint64_t used = 0;
    for (int i = 0; i < MAX_PROCESSES; i++)
      if (shared->process[i].pid) used += shared->process[i].used[d];
    shared->device[d].used = used;
  }
}

static void lock_shared(void) {
  if (pthread_mutex_lock(&shared->lock) == EOWNERDEAD) {
    recount();
    pthread_mutex_consistent(&shared->lock);
  }
}

void state_lock(void) { lock_shared(); }
void state_unlock(void) { pthread_mutex_unlock(&shared->lock); }

static struct flock slot_range(const Process* process, short type) {
  return (struct flock){.l_type = type,
                        .l_whence = SEEK_SET,
                        .l_start = process - shared->process + 1,
                        .l_len = 1};
}

static bool slot_is_dead(const Process* process) {
  if (!process->pid || process == self) return false;
  struct flock range = slot_range(process, F_WRLCK);
  return !fcntl(state_file, F_GETLK, &range) && range.l_type == F_UNLCK;
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
    process->used[d] = (uint64_t)bytes;  // the report shows what it held last
  }
  timeline_flush(process);
  report_write(process);
  memset(process, 0, offsetof(Process, timeline));
}

// Gives back what processes that died still hold. Under the state lock.
static void reap(void) {
  for (int i = 0; i < MAX_PROCESSES; i++)
    if (slot_is_dead(&shared->process[i])) slot_close(&shared->process[i]);
}

EXPORT void vgpu_reap(void) {
  if (!state_init()) return;
  state_lock();
  reap();
  state_unlock();
}

static bool map_state(void) {
  char path[600];
  snprintf(path, sizeof path, "%s/state", folder);
  state_file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (state_file < 0) {
    message("cannot open %s: %s", path, strerror(errno));
    return false;
  }
  struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
  fcntl(state_file, F_SETLKW, &whole);
  bool made = false;
  struct stat st;
  if (!fstat(state_file, &st) && st.st_size == 0)
    made = !ftruncate(state_file, sizeof(Shared));
  shared =
      mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, state_file, 0);
  if (shared == MAP_FAILED) {
    shared = NULL;
    message("cannot map %s: %s", path, strerror(errno));
    return false;
  }
  if (made) {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&shared->lock, &attributes);
    shared->phase_now = -1;
    for (int d = 0; d < config.devices; d++)
      shared->device[d].other = shared->device[d].peak = config.device[d].other;
    read_rules();
    shared->ready = 1;
  }
  whole.l_type = F_UNLCK;
  fcntl(state_file, F_SETLK, &whole);
  return true;
}

static bool take_slot(void) {
  state_lock();
  reap();
  for (int i = 0; i < MAX_PROCESSES && !self; i++) {
    Process* process = &shared->process[i];
    if (process->pid) continue;
    struct flock range = slot_range(process, F_WRLCK);
    if (fcntl(state_file, F_SETLK, &range)) continue;
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
  Process* mine = self;
  self = NULL;
  slot_close(mine);
  state_unlock();
  struct flock range = slot_range(mine, F_UNLCK);
  fcntl(state_file, F_SETLK, &range);
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
  if (shared) munmap(shared, sizeof(Shared));
  if (state_file >= 0) close(state_file);
  shared = NULL;
  state_file = -1;
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
    bool ready = run && read_config() && map_state() &&
                 (observer || (take_slot() && (forked || memory_init())));
    if (ready) read_visible();
    __atomic_store_n(&init_state, ready ? READY : FAILED, __ATOMIC_RELEASE);
  }
  bool ready = init_state == READY;
  pthread_mutex_unlock(&init_lock);
  return ready;
}

// ---- used bytes

uint64_t device_used(int device) {
  state_lock();
  uint64_t used = shared->device[device].used + shared->device[device].other;
  state_unlock();
  return used;
}

uint64_t run_used(int device) {
  state_lock();
  uint64_t used = shared->device[device].used;
  state_unlock();
  return used;
}

uint64_t device_free(int device) {
  state_lock();
  reap();
  uint64_t used = shared->device[device].used + shared->device[device].other;
  state_unlock();
  uint64_t memory = config.device[device].memory;
  return used > memory ? 0 : memory - used;
}

bool charge(int device, int64_t bytes, const char* cause) {
  if (bytes == 0) return true;
  state_lock();
  if (bytes > 0) {
    moves_at_allocation(device);
    uint64_t memory = config.device[device].memory;
    for (int attempt = 0;; attempt++) {
      uint64_t used = shared->device[device].used + shared->device[device].other;
      if (used <= memory && (uint64_t)bytes <= memory - used) break;
      if (attempt) {
        state_unlock();
        return false;
      }
      reap();
    }
    shared->device[device].allocations++;
  }
  shared->device[device].used += bytes;
  self->used[device] += bytes;
  timeline_event(device, bytes, cause, self);
  state_unlock();
  return true;
}
