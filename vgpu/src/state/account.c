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

uint64_t device_free(int device) {
  state_lock();
  state_reap();
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
      state_reap();
    }
    shared->device[device].allocations++;
  }
  shared->device[device].used += bytes;
  self->used[device] += bytes;
  timeline_event(device, bytes, cause, self);
  state_unlock();
  return true;
}

void pin(int64_t bytes) {
  state_lock();
  self->pinned += bytes;
  self->pinned_peak = MAX(self->pinned_peak, self->pinned);
  state_unlock();
}
