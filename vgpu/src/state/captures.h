// The captures of streams that are under way, and the calls that they forbid.
#pragma once

#include <cuda.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct Capture {
  uint64_t id;
  int mode;
  pthread_t thread;
  struct CUstream_st* origin;
  struct CUgraph_st* graph;
  bool valid;
  struct Capture* next;
} Capture;

Capture* captures(void);  // the one begun last; NULL: none is under way
// With objects_lock held.
void capture_begun(Capture* capture);
void capture_ended(const Capture* capture);

void capture_mode_exchange(int* mode);  // of this thread
// Error 900 and an ended capture, when a call that waits or allocates is made
// where CUDA forbids it.
CUresult unsafe_call(void);
