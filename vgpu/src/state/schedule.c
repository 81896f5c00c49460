// What the configuration and control have scheduled: failures of calls, and other
// processes' memory.
#include <ctype.h>
#include <fnmatch.h>
#include <string.h>

#include "state/account.h"

// ---- failures

static void base_name(const char* call, char base[NAME_BYTES]) {
  snprintf(base, NAME_BYTES, "%s", call);
  char* v = strrchr(base, '_');
  if (v && v[1] == 'v' && isdigit(v[2])) *v = 0;
}

int injected(const char* call, int device, uint64_t size) {
  if (!__atomic_load_n(&shared->rules, __ATOMIC_RELAXED)) return 0;
  char base[NAME_BYTES];
  base_name(call, base);
  int error = 0;
  state_lock();
  for (int i = 0; i < shared->rules && !error; i++) {
    Rule* r = &shared->rule[i];
    if (!r->times || (r->device >= 0 && r->device != device)) continue;
    if (size <= r->over && r->over) continue;
    if (fnmatch(r->call, base, 0)) continue;
    if (++r->seen < r->nth) continue;
    r->times--;
    r->fired++;
    if (self) self->fired[i]++;
    error = r->error;
  }
  state_unlock();
  return error;
}

// ---- other processes' memory

void other_process(int device, int64_t bytes) {
  uint64_t* other = &shared->device[device].other;
  if (bytes > 0) bytes = (int64_t)MIN((uint64_t)bytes, available_now(device));
  if (bytes < 0) bytes = -(int64_t)MIN((uint64_t)-bytes, *other);
  *other += bytes;
  available_now(device);
  timeline_event(device, bytes, "other process", NULL);
}

void moves_at_allocation(int device) {
  for (int i = 0; i < shared->moves; i++) {
    Move* m = &shared->move[i];
    if (m->done || m->device != device || !m->at_allocation) continue;
    if (shared->device[device].allocations + 1 < m->at_allocation) continue;
    m->done = true;
    other_process(device, m->bytes);
  }
}

void moves_at_phase(const char* phase) {
  for (int i = 0; i < shared->moves; i++) {
    Move* m = &shared->move[i];
    if (m->done || fnmatch(m->at_phase, phase, 0)) continue;
    m->done = true;
    other_process(m->device, m->bytes);
  }
}
