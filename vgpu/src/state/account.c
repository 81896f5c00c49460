// Used bytes of a device, and pinned bytes of the host.
#include "state/account.h"

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

uint64_t device_available(int device) {
  state_lock();
  state_reap();
  uint64_t bytes = available_now(device);
  state_unlock();
  return bytes;
}

uint64_t device_free(int device) {
  uint64_t bytes = device_available(device);
  return bytes - MIN(bytes, config.device[device].page_cache);
}

bool charge(int device, int64_t bytes, const char* cause) {
  if (bytes == 0) return true;
  state_lock();
  if (bytes > 0) {
    moves_at_allocation(device);
    uint64_t left = available_now(device);
    if ((uint64_t)bytes > left) {
      state_reap();
      left = available_now(device);
    }
    if ((uint64_t)bytes > left) {
      state_unlock();
      return false;
    }
    note_available(device, left - (uint64_t)bytes);
    shared->device[device].allocations++;
  }
  shared->device[device].used += bytes;
  self->used[device] += bytes;
  timeline_event(device, bytes, cause, self);
  state_unlock();
  return true;
}

bool charge_once(int device, uint64_t bytes, const char* cause,
                 bool taken[MAX_DEVICES]) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&lock);
  bool fits = taken[device] || charge(device, (int64_t)bytes, cause);
  taken[device] = fits;
  pthread_mutex_unlock(&lock);
  return fits;
}

bool charge_first_library(int device) {
  static bool taken[MAX_DEVICES];
  return charge_once(device, config.device[device].first_library, "first library",
                     taken);
}

// CUDA programming guide, table of compute capabilities.
int device_threads(int device) {
  const DeviceConfig* d = &config.device[device];
  return d->major == 8 && d->minor ? 1536 : d->major == 12 ? 1536 : 2048;
}

// The driver keeps a stack for every thread that the device can have in flight, of the
// largest kernel launched so far. A context has it for cudaLimitStackSize, 1024 bytes.
bool charge_stack(int device, uint64_t bytes) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static uint64_t held[MAX_DEVICES];
  const DeviceConfig* d = &config.device[device];
  uint64_t has = MAX(held[device], 1024u);
  if (!d->local_memory || bytes <= has) return true;
  pthread_mutex_lock(&lock);
  has = MAX(held[device], 1024u);
  uint64_t threads = (uint64_t)d->sm_count * (uint64_t)device_threads(device);
  bool fits =
      bytes <= has || charge(device, (int64_t)((bytes - has) * threads), "stack");
  if (fits) held[device] = MAX(has, bytes);
  pthread_mutex_unlock(&lock);
  return fits;
}

void pin(int64_t bytes) {
  state_lock();
  self->pinned += bytes;
  self->pinned_peak = MAX(self->pinned_peak, self->pinned);
  state_unlock();
}
