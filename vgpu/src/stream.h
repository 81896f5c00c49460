// Streams, events and what a stream being captured keeps.
#pragma once

#include "vgpu.h"

typedef struct CUgraphNode_st {
  Operation operation;
} Node;

typedef struct CUgraph_st {
  Node** node;
  size_t nodes, room;
} Graph;

typedef struct Capture {
  uint64_t id;
  int mode;
  pthread_t thread;
  struct CUstream_st* origin;
  Graph* graph;
  bool valid;
  struct Capture* next;
} Capture;

typedef struct CUstream_st {
  int ordinal, priority;
  unsigned flags;
  uint64_t id;
  Capture* capture;
  Node* last;       // captured last
  uint64_t steps;   // captured so far
  uint64_t joined;  // of these, how many another captured stream waits for
} Stream;

typedef struct CUevent_st {
  unsigned flags;
  bool recorded;
  uint64_t nanoseconds;
  uint64_t capture;  // its id, 0: recorded outside a capture
  Stream* stream;
  uint64_t steps;
} Event;

extern pthread_mutex_t objects_lock;

Stream* stream_find(void* handle);  // NULL: the legacy or per-thread stream
bool stream_is(void* handle);
Capture* captures(void);
CUresult capture_add(Stream* stream, const Operation* operation);
void streams_each(void (*visit)(Stream*, void*), void* data);  // locked
