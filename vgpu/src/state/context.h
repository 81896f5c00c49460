// What every call of CUDA begins and ends with: contexts, and errors.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "state/base.h"

// ---- errors.c

extern int sticky;  // the error that has ended this process's CUDA, or 0

void sticky_error(int error);
cudaError_t rt_leave(cudaError_t error);

// ---- context.c

bool is_ordinal(int ordinal);
int current_ordinal(void);
int current_device(void);       // configured index
CUresult context_usable(void);  // the error that a call in any context returns
CUresult context_enter(void);   // as a call that needs a context, or its error
cudaError_t rt_enter(const char* call, uint64_t size, bool needs_context);
typedef enum { NOTHING, ANY_CONTEXT, CURRENT_CONTEXT } Needs;

CUresult drv_enter(const char* call, uint64_t size, Needs needs);
CUcontext context_of(int ordinal);  // not retained

#define RT_ENTER(size)                                    \
  do {                                                    \
    cudaError_t entered = rt_enter(__func__, size, true); \
    if (entered) return entered;                          \
  } while (0)
#define DRV_ENTER(size)                                            \
  do {                                                             \
    CUresult entered = drv_enter(__func__, size, CURRENT_CONTEXT); \
    if (entered) return entered;                                   \
  } while (0)
// For calls that need none of the thread: an error that ended one is theirs, too.
#define DRV_USE(size)                                          \
  do {                                                         \
    CUresult entered = drv_enter(__func__, size, ANY_CONTEXT); \
    if (entered) return entered;                               \
  } while (0)
// For calls that need no context.
#define RT_START()                                      \
  do {                                                  \
    cudaError_t entered = rt_enter(__func__, 0, false); \
    if (entered) return entered;                        \
  } while (0)
#define DRV_START()                                     \
  do {                                                  \
    CUresult entered = drv_enter(__func__, 0, NOTHING); \
    if (entered) return entered;                        \
  } while (0)
#define RT(error) return rt_leave((cudaError_t)(error))
// A call that the runtime and the driver have.
#define BOTH(rt, drv, rt_parameters, drv_parameters, action) \
  EXPORT cudaError_t rt rt_parameters {                      \
    RT_ENTER(0);                                             \
    RT(action);                                              \
  }                                                          \
  EXPORT CUresult drv drv_parameters {                       \
    DRV_ENTER(0);                                            \
    return action;                                           \
  }
