// The captures of streams that are under way, and the calls that they forbid.
#include "state/captures.h"

#include "state/objects.h"

static Capture* active;
static __thread int thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

Capture* captures(void) { return __atomic_load_n(&active, __ATOMIC_RELAXED); }

void capture_begun(Capture* capture) {
  capture->next = active;
  __atomic_store_n(&active, capture, __ATOMIC_RELAXED);
}

void capture_ended(const Capture* capture) {
  Capture** at = &active;
  while (*at != capture) at = &(*at)->next;
  __atomic_store_n(at, capture->next, __ATOMIC_RELAXED);
}

void capture_mode_exchange(int* mode) {
  int old = thread_mode;
  thread_mode = *mode;
  *mode = old;
}

// The rules of cudaThreadExchangeStreamCaptureMode's documentation.
CUresult unsafe_call(void) {
  if (!__atomic_load_n(&active, __ATOMIC_RELAXED)) return CUDA_SUCCESS;
  CUresult error = CUDA_SUCCESS;
  pthread_mutex_lock(&objects_lock);
  for (Capture* c = active; c; c = c->next) {
    if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) break;
    bool mine = pthread_equal(c->thread, pthread_self());
    bool forbids = mine ? c->mode != CU_STREAM_CAPTURE_MODE_RELAXED
                        : c->mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
                              thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (!forbids) continue;
    c->valid = false;
    error = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  pthread_mutex_unlock(&objects_lock);
  return error;
}
