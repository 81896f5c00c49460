// Accounting: bytes taken and returned, their record, and scheduled moves.
#pragma once

#include "state/state.h"

// ---- available.c

// From now on, this process's host memory is subtracted from the device's memory, if
// they share it.
void enter_host(int device);

// Under the state lock:

// Bytes that can still be taken of a device, and of its host if they share memory.
uint64_t available_now(int device);
void note_available(int device, uint64_t bytes);  // it may be the least so far

// ---- account.c

// Takes bytes of a device's memory, or gives them back (negative).
// False, and nothing is taken, when they do not fit.
bool charge(int device, int64_t bytes, const char* cause);
// As charge, for memory that a process takes once and keeps until it ends; `taken`
// marks it.
bool charge_once(int device, uint64_t bytes, const char* cause,
                 bool taken[MAX_DEVICES]);
// What the first of cuBLAS or NCCL takes.
bool charge_first_library(int device);
// The stack of a kernel, in bytes a thread, where the card has `local_memory`.
bool charge_stack(int device, uint64_t bytes);
int device_threads(int device);    // that a multiprocessor keeps
uint64_t device_used(int device);  // every process and the others
uint64_t run_used(int device);     // every process of the run
uint64_t device_available(int device);
uint64_t device_free(int device);  // that, less the page cache of the host

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
