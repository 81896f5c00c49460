// Contexts, and entering a call: which device a thread is on, and whether the call
// may be made.
#include "state/context.h"

#include "state/account.h"
#include "state/calls.h"
#include "state/driver.h"

typedef struct CUctx_st {
  int ordinal;
  bool made;
  int retained;
} Context;

static __thread Context* current;
static __thread int ordinal_set;
static Context contexts[MAX_DEVICES];
static pthread_mutex_t context_lock = PTHREAD_MUTEX_INITIALIZER;

bool is_ordinal(int ordinal) { return ordinal >= 0 && ordinal < visible_devices(); }

static bool initialized;  // by cuInit

// NULL: the thread has none, or it has ended.
static Context* current_context(void) {
  return current && current->made ? current : NULL;
}

int current_ordinal(void) { return current_context() ? current->ordinal : ordinal_set; }
int current_device(void) { return device_index(current_ordinal()); }

static CUresult context_make(int ordinal) {
  pthread_mutex_lock(&context_lock);
  Context* context = &contexts[ordinal];
  CUresult error = CUDA_SUCCESS;
  if (!context->made) {
    int device = device_index(ordinal);
    enter_host(device);
    if (charge(device, (int64_t)config.device[device].context, "context")) {
      context->ordinal = ordinal;
      context->made = true;
      __atomic_fetch_or(&self->contexts, 1u << device, __ATOMIC_RELAXED);
    } else {
      error = CUDA_ERROR_OUT_OF_MEMORY;
    }
  }
  if (!error) context->retained++;
  pthread_mutex_unlock(&context_lock);
  return error;
}

// Its own memory is returned; allocations in it stay its program's.
static CUresult context_give(int ordinal, bool all) {
  pthread_mutex_lock(&context_lock);
  Context* context = &contexts[ordinal];
  bool right = context->made;
  if (right && (all || !--context->retained)) {
    int device = device_index(ordinal);
    charge(device, -(int64_t)config.device[device].context, "context");
    __atomic_fetch_and(&self->contexts, ~(1u << device), __ATOMIC_RELAXED);
    context->made = false;
    context->retained = 0;
  }
  pthread_mutex_unlock(&context_lock);
  return right || all ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

// What needs no context (which device, which properties) works on after an error
// that ended the context.
static CUresult usable(bool needs_context) {
  if (!state_init())
    return process_ended() ? CUDA_ERROR_DEINITIALIZED : CUDA_ERROR_NO_DEVICE;
  if (forked_after_init()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!visible_devices()) return CUDA_ERROR_NO_DEVICE;
  return needs_context ? __atomic_load_n(&sticky, __ATOMIC_RELAXED) : 0;
}

static CUresult enter(const char* call, uint64_t size, bool needs_context) {
  CUresult error = usable(needs_context);
  if (error) return error;
  if (config.trace) message("%s(%lu)", call, size);
  call_made(call);
  return injected(call, current_device(), size);
}

CUresult context_usable(void) { return usable(true); }

// As libcudart: it retains the context of a device once.
static CUresult context_use(int ordinal) {
  static bool held[MAX_DEVICES];
  CUcontext context = &contexts[ordinal];
  if (!context->made || !__atomic_load_n(&held[ordinal], __ATOMIC_RELAXED)) {
    CUresult error = driver()->cuDevicePrimaryCtxRetain(&context, ordinal);
    if (error) return error;
    __atomic_store_n(&held[ordinal], true, __ATOMIC_RELAXED);
  }
  ordinal_set = ordinal;
  current = context;
  return CUDA_SUCCESS;
}

// As libcudart, whose first call is cuInit: a slice begins there.
static CUresult initialize(void) {
  static bool asked;
  if (__atomic_load_n(&asked, __ATOMIC_RELAXED)) return CUDA_SUCCESS;
  CUresult error = driver()->cuInit(0);
  if (!error) __atomic_store_n(&asked, true, __ATOMIC_RELAXED);
  return error;
}

CUresult context_enter(void) {
  CUresult error = initialize();
  if (!error) error = usable(true);
  return error || current_context() ? error : context_use(ordinal_set);
}

cudaError_t rt_enter(const char* call, uint64_t size, bool needs_context) {
  CUresult error = initialize();
  if (!error) error = enter(call, size, needs_context);
  if (!error && needs_context && !current_context()) error = context_use(ordinal_set);
  return rt_leave((cudaError_t)error);
}

CUresult drv_enter(const char* call, uint64_t size, Needs needs) {
  if (!__atomic_load_n(&initialized, __ATOMIC_RELAXED))
    return CUDA_ERROR_NOT_INITIALIZED;
  CUresult error = enter(call, size, needs != NOTHING);
  if (error || needs != CURRENT_CONTEXT || current_context()) return error;
  return CUDA_ERROR_INVALID_CONTEXT;
}

CUcontext context_of(int ordinal) { return &contexts[ordinal]; }

// ---- the calls

EXPORT CUresult cuInit(unsigned flags) {
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  CUresult error = enter(__func__, 0, false);
  if (!error) __atomic_store_n(&initialized, true, __ATOMIC_RELAXED);
  return error;
}

EXPORT cudaError_t cudaGetDevice(int* ordinal) {
  RT_START();
  *ordinal = current_ordinal();
  return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int ordinal) {
  RT_START();
  if (!is_ordinal(ordinal)) RT(cudaErrorInvalidDevice);
  RT(context_use(ordinal));
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice ordinal) {
  DRV_START();
  if (!is_ordinal(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  CUresult error = context_make(ordinal);
  if (!error) *context = &contexts[ordinal];
  return error;
}

EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice ordinal) {
  DRV_START();
  return is_ordinal(ordinal) ? context_give(ordinal, false) : CUDA_ERROR_INVALID_DEVICE;
}

EXPORT CUresult cuDevicePrimaryCtxReset(CUdevice ordinal) {
  DRV_START();
  return is_ordinal(ordinal) ? context_give(ordinal, true) : CUDA_ERROR_INVALID_DEVICE;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice ordinal, unsigned* flags,
                                           int* active) {
  DRV_START();
  if (!is_ordinal(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *flags = 0;
  *active = contexts[ordinal].made;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  DRV_START();
  *context = current_context();
  return CUDA_SUCCESS;
}

static bool is_context(CUcontext context) {
  return context >= contexts && context < contexts + MAX_DEVICES && context->made;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
  DRV_START();
  if (context && !is_context(context)) return CUDA_ERROR_INVALID_CONTEXT;
  current = context;
  return CUDA_SUCCESS;
}

static __thread Context* pushed[64];
static __thread int pushed_count;

EXPORT CUresult cuCtxPushCurrent(CUcontext context) {
  DRV_START();
  if (!is_context(context)) return CUDA_ERROR_INVALID_CONTEXT;
  if (pushed_count == 64) return CUDA_ERROR_OUT_OF_MEMORY;
  pushed[pushed_count++] = current;
  current = context;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent(CUcontext* context) {
  DRV_START();
  if (!pushed_count) return CUDA_ERROR_INVALID_CONTEXT;
  if (context) *context = current;
  current = pushed[--pushed_count];
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
  DRV_START();
  if (!current_context()) return CUDA_ERROR_INVALID_CONTEXT;
  *device = current->ordinal;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetApiVersion(CUcontext context, unsigned* version) {
  (void)context;
  *version = 3020;
  return CUDA_SUCCESS;
}
