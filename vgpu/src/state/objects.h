// Objects that a program holds by pointer.
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

typedef enum {
  STREAM = 1,
  EVENT,
  GRAPH,
  EXEC,
  MODULE,
  KERNEL,
  COMMUNICATOR,
  COLLECTIVE,
  USER_OBJECT,
  LOG_CALLBACK,
  OTHER
} Kind;

void* object_new(Kind kind, size_t bytes);
bool object_is(const void* object, Kind kind);
bool object_delete(void* object, Kind kind);  // false: no such object

extern pthread_mutex_t objects_lock;

// With objects_lock held.
bool object_is_locked(const void* object, Kind kind);
void objects_each(Kind kind, void (*visit)(void* object, void* data), void* data);
