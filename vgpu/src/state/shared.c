// What all processes of a run share: the file `state` in the run folder, named by
// VGPU_RUN, which each of them maps.
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "state/state.h"

Shared* shared;
Process* self;
int shared_file = -1;

static void recount(void) {
  for (int d = 0; d < config.devices; d++) {
    uint64_t used = 0;
    for (int i = 0; i < MAX_PROCESSES; i++)
      if (shared->process[i].pid) used += shared->process[i].used[d];
    shared->device[d].used = used;
  }
}

void state_lock(void) {
  if (pthread_mutex_lock(&shared->lock) == EOWNERDEAD) {
    recount();
    pthread_mutex_consistent(&shared->lock);
  }
}

void state_unlock(void) { pthread_mutex_unlock(&shared->lock); }

bool shared_map(const char* folder) {
  char path[600];
  snprintf(path, sizeof path, "%s/state", folder);
  shared_file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (shared_file < 0) {
    message("cannot open %s: %s", path, strerror(errno));
    return false;
  }
  struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
  fcntl(shared_file, F_SETLKW, &whole);
  bool made = false;
  struct stat st;
  if (!fstat(shared_file, &st) && st.st_size == 0)
    made = !ftruncate(shared_file, sizeof(Shared));
  shared =
      mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, shared_file, 0);
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
    for (int d = 0; d < config.devices; d++) {
      const DeviceConfig* device = &config.device[d];
      shared->device[d].other = shared->device[d].peak = device->other;
      shared->device[d].least_available = device->memory - device->other;
    }
    config_read_schedule(shared);
  }
  whole.l_type = F_UNLCK;
  fcntl(shared_file, F_SETLK, &whole);
  return true;
}

void shared_unmap(void) {
  if (shared) munmap(shared, sizeof(Shared));
  if (shared_file >= 0) close(shared_file);
  shared = NULL;
  shared_file = -1;
}
