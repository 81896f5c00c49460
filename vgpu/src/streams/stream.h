// Streams, events, graphs, and the operations that they are made of.
#pragma once

#include "memory/graph_memory.h"
#include "state/captures.h"

typedef enum {
  NODE_KERNEL,
  NODE_COPY,
  NODE_FILL,
  NODE_HOST,
  NODE_EVENT,
  NODE_COLLECTIVE,
  NODE_ALLOCATE,
  NODE_FREE,
  NODE_DONE,  // never of a graph: the end of a launch of one that allocates
} NodeKind;

typedef struct {
  NodeKind kind;
  uint64_t to, from, size, value;
  int value_bytes;
  void (*function)(void*);  // of NODE_HOST
  CUresult (*call)(void*);  // of NODE_COLLECTIVE, and of a kernel that computes
  void* argument;           // of those, and memory of a graph; NULL: `to` is freed
} Operation;

typedef struct CUgraphNode_st {
  Operation operation;
} Node;

// References to user objects.
typedef struct {
  struct {
    struct CUuserObject_st* object;
    uint64_t references;
  }* of;
  size_t n;
} Kept;

typedef struct CUgraph_st {
  Node** node;
  size_t nodes, room;
  Kept kept;
  GraphMemory* memory;  // NULL: no node allocates or frees
} Graph;

struct Work;

typedef struct CUstream_st {
  int ordinal, priority;
  unsigned flags;
  uint64_t id;
  Capture* capture;
  Node* last;       // captured last
  uint64_t steps;   // captured so far
  uint64_t joined;  // of these, how many another captured stream waits for
  struct Work *work, *last_work;  // not done yet
  uint64_t given;                 // the number of the last
  uint64_t freed;                 // the number of the last that frees memory
  int queries;                    // since it was last waited for
} Stream;

// A place in a stream's work; no stream: it was reached at once.
typedef struct {
  Stream* stream;
  uint64_t number;
} Mark;

typedef struct CUevent_st {
  unsigned flags;
  int ordinal;  // of the device that it was made on
  bool recorded;
  uint64_t nanoseconds;
  uint64_t capture;  // its id, 0: recorded outside a capture
  Stream* stream;
  uint64_t steps;
  Mark mark;
} Event;

// ---- operation.c

Stream* stream_find(void* handle);  // NULL: the legacy or per-thread stream
bool stream_is(void* handle);
bool stream_is_default(const void* handle);
// Runs the operation now, or adds it to the graph the stream is capturing.
CUresult stream_run(void* stream, const Operation* operation);
CUresult capture_add(Stream* stream, const Operation* operation);
void graph_empty(Graph* graph);

// ---- queue.c

// Does the operation, or gives it to the stream to do.
CUresult operation_post(Stream* stream, const Operation* operation);
Mark stream_mark(Stream* stream);  // after all that it was given
Mark stream_all(Stream* stream);
void stream_wait_for(Stream* stream, const Mark* mark);
bool mark_is_reached(const Mark* mark);  // counts as a query
CUresult mark_finish(const Mark* mark);
CUresult stream_finish(Stream* stream);
CUresult stream_finish_frees(Stream* stream);  // up to the last that frees memory
CUresult device_finish(void);                  // all work of the current device

// ---- user_object.c

void kept_copy(Kept* to, const Kept* from);
void kept_release(Kept* kept);

// ---- image.c

// Bytes a thread of the largest of its kernels; 0: the image is no ELF file.
uint64_t image_stack(const void* image);
// Its kernels, and their names to be freed; -1: the image is no ELF file.
int image_kernels(const void* image, char*** names);

// ---- module.c

// What a kernel compiled into the program was registered with; NULL: unknown.
const void* kernel_image(const void* function);
