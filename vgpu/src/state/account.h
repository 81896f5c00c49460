// Accounting: bytes taken and given back, their record, and what is scheduled.
#pragma once

#include "state/state.h"

// ---- account.c

// Takes bytes of a device's memory, or gives them back (negative).
// False, and nothing is taken, when they do not fit.
bool charge(int device, int64_t bytes, const char* cause);
uint64_t device_used(int device);  // every process and the others
uint64_t run_used(int device);     // every process of the run
uint64_t device_free(int device);

void pin(int64_t bytes);  // host memory of this process

// ---- timeline.c

void timeline_event(int device, int64_t bytes, const char* cause, Process* by);
void timeline_flush(Process* process);
void report_write(Process* process);

// ---- schedule.c

int injected(const char* call, int device, uint64_t size);
// Under the state lock: another process takes memory of a device, or gives it back.
void other_process(int device, int64_t bytes);
void moves_at_allocation(int device);
void moves_at_phase(const char* phase);
