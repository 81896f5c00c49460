// Control from inside the program (vgpu.control) or outside (vgpu control): the
// same functions on the shared state.
#include <string.h>

#include "state/account.h"
#include "state/calls.h"
#include "state/names.h"

EXPORT void vgpu_reap(void) {
  if (!state_init()) return;
  state_lock();
  state_reap();
  state_unlock();
}

// ---- failures

EXPORT int vgpu_inject(const char* call, int device, uint64_t nth, uint64_t over,
                       uint64_t times, int error) {
  if (!state_init()) return -1;
  Rule rule = {
      .device = device, .nth = nth, .over = over, .times = times, .error = error};
  snprintf(rule.call, sizeof rule.call, "%s", call);
  state_lock();
  int at = 0;
  while (at < shared->rules && shared->rule[at].times) at++;
  if (at < MAX_RULES) {
    shared->rule[at] = rule;
    shared->rules = MAX(shared->rules, at + 1);
    if (self) self->fired[at] = 0;
  }
  state_unlock();
  return at < MAX_RULES ? at : -1;
}

EXPORT int64_t vgpu_fired(int rule) {
  if (!state_init() || rule < 0 || rule >= shared->rules) return -1;
  return (int64_t)shared->rule[rule].fired;
}

EXPORT void vgpu_inject_clear(void) {
  if (!state_init()) return;
  state_lock();
  for (int i = 0; i < shared->rules; i++) shared->rule[i].times = 0;
  state_unlock();
}

// ---- other processes' memory

// At once, or at the device's n-th allocation, or when a phase opens.
EXPORT int vgpu_other(int device, int64_t bytes, uint64_t at_allocation,
                      const char* at_phase) {
  if (!state_init() || device < 0 || device >= config.devices) return -1;
  int result = 0;
  state_lock();
  if (!at_allocation && !*at_phase) {
    other_process(device, bytes);
  } else {
    int at = 0;
    while (at < shared->moves && !shared->move[at].done) at++;
    if (at < MAX_MOVES) {
      Move* m = &shared->move[at];
      *m = (Move){.device = device, .bytes = bytes, .at_allocation = at_allocation};
      snprintf(m->at_phase, sizeof m->at_phase, "%s", at_phase);
      shared->moves = MAX(shared->moves, at + 1);
    }
    result = at < MAX_MOVES ? 0 : -1;
  }
  state_unlock();
  return result;
}

// ---- pinned host memory

// What: 0 pinned by this process, 1 its peak.
EXPORT int64_t vgpu_pinned(int what) {
  if (!state_init() || !self) return -1;
  state_lock();
  uint64_t bytes = what ? self->pinned_peak : self->pinned;
  state_unlock();
  return (int64_t)bytes;
}

// ---- phases

static int phase_find(const char* name) {
  for (int i = 0; i < shared->phases; i++)
    if (!strcmp(shared->phase[i].name, name)) return i;
  return -1;
}

static uint64_t used_now(int device) {
  return shared->device[device].used + shared->device[device].other;
}

EXPORT int vgpu_phase_begin(const char* name) {
  if (!state_init()) return -1;
  state_lock();
  int at = phase_find(name);
  if (at < 0 && shared->phases < MAX_PHASES) {
    at = shared->phases++;
    shared->phase[at] = (Phase){.open = 0};
    snprintf(shared->phase[at].name, NAME_BYTES, "%s", name);
  }
  if (at >= 0) {
    Phase* phase = &shared->phase[at];
    phase->open++;
    phase->before = shared->phase_now;
    shared->phase_now = at;
    moves_at_phase(name);
    for (int d = 0; d < config.devices; d++) {
      phase->peak[d] = MAX(phase->peak[d], used_now(d));
      for (int i = 0; i < MAX_PROCESSES; i++) {
        Process* p = &shared->process[i];
        if (p->pid) p->phase_peak[at][d] = MAX(p->phase_peak[at][d], p->used[d]);
      }
      timeline_event(d, 0, "phase", self);
    }
  }
  state_unlock();
  return at < 0 ? -1 : 0;
}

EXPORT int vgpu_phase_end(const char* name) {
  if (!state_init()) return -1;
  state_lock();
  int at = phase_find(name);
  bool right = at >= 0 && shared->phase[at].open > 0;
  if (right) {
    shared->phase[at].open--;
    if (shared->phase_now == at) {
      int before = shared->phase[at].before;
      shared->phase_now = before >= 0 && shared->phase[before].open > 0 ? before : -1;
      for (int d = 0; d < config.devices; d++) timeline_event(d, 0, "phase end", self);
    }
  }
  state_unlock();
  return right ? 0 : -1;
}

// ---- reading

// What: 0 used by all processes and the others, 1 its peak, 2 used by this process, 3
// its peak, 4 held by the others, 5 memory, 6 allocations so far, 7 the available
// memory now, 8 the least of that.
EXPORT int64_t vgpu_bytes(int device, int what) {
  if (!state_init() || device < 0 || device >= config.devices) return -1;
  state_lock();
  uint64_t bytes = what == 0   ? used_now(device)
                   : what == 1 ? shared->device[device].peak
                   : what == 2 ? (self ? self->used[device] : 0)
                   : what == 3 ? (self ? self->peak[device] : 0)
                   : what == 4 ? shared->device[device].other
                   : what == 5 ? config.device[device].memory
                   : what == 6 ? shared->device[device].allocations
                   : what == 7 ? available_now(device)
                               : shared->device[device].least_available;
  state_unlock();
  return (int64_t)bytes;
}

EXPORT int64_t vgpu_phase_peak(const char* name, int device, int process) {
  if (!state_init() || device < 0 || device >= config.devices) return -1;
  state_lock();
  int at = phase_find(name);
  int64_t peak = at < 0     ? -1
                 : !process ? (int64_t)shared->phase[at].peak[device]
                 : self     ? (int64_t)self->phase_peak[at][device]
                            : 0;
  state_unlock();
  return peak;
}

EXPORT int vgpu_reset_peak(int device) {
  if (!state_init() || device < 0 || device >= config.devices) return -1;
  state_lock();
  shared->device[device].peak = used_now(device);
  shared->device[device].least_available = available_now(device);
  if (self) {
    self->peak[device] = self->used[device];
    self->pinned_peak = self->pinned;
  }
  state_unlock();
  return 0;
}

EXPORT int vgpu_devices(void) { return state_init() ? config.devices : -1; }

EXPORT uint64_t vgpu_kernels(void) { return state_init() && self ? self->kernels : 0; }

// How often this process entered implemented calls whose names fit a pattern.
EXPORT uint64_t vgpu_made(const char* pattern) { return calls_made(pattern); }

// How often this process made a call that is not implemented.
EXPORT int64_t vgpu_calls(const char* name) {
  if (!state_init() || !self) return -1;
  for (int i = 0; i < MIN(calls, MAX_CALLS); i++)
    if (!strcmp(call_name[i], name)) return self->calls[i];
  for (int i = 0; i < MAX_LATE_CALLS && self->late_call[i][0]; i++)
    if (!strcmp(self->late_call[i], name)) return self->late_calls[i];
  return 0;
}
