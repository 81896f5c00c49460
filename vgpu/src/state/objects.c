// Objects that a program holds by pointer: any other pointer is an error.
#include "state/objects.h"

#include <stdlib.h>

#include "state/ranges.h"

pthread_mutex_t objects_lock = PTHREAD_MUTEX_INITIALIZER;

static Ranges objects;

void* object_new(Kind kind, size_t bytes) {
  void* object = calloc(1, bytes);
  if (!object) abort();
  pthread_mutex_lock(&objects_lock);
  ranges_add(&objects, (uint64_t)object, 1, (void*)(uintptr_t)kind);
  pthread_mutex_unlock(&objects_lock);
  return object;
}

bool object_is_locked(const void* object, Kind kind) {
  Range* r = ranges_at(&objects, (uint64_t)object);
  return r && (Kind)(uintptr_t)r->data == kind;
}

bool object_is(const void* object, Kind kind) {
  pthread_mutex_lock(&objects_lock);
  bool is = object_is_locked(object, kind);
  pthread_mutex_unlock(&objects_lock);
  return is;
}

bool object_delete(void* object, Kind kind) {
  pthread_mutex_lock(&objects_lock);
  bool is = object_is_locked(object, kind);
  if (is) ranges_remove(&objects, (uint64_t)object);
  pthread_mutex_unlock(&objects_lock);
  if (is) free(object);
  return is;
}

void objects_each(Kind kind, void (*visit)(void*, void*), void* data) {
  for (Range* r = ranges_above(&objects, 0); r; r = ranges_above(&objects, r->start))
    if ((Kind)(uintptr_t)r->data == kind) visit((void*)r->start, data);
}
