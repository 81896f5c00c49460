// How the runtime asks the driver. libcudart finds its calls by dlsym and
// cuGetProcAddress, which software that slices a GPU overrides (HAMi-core): for
// memory and properties the stand-in does so too, or it would pass them by.
#include "state/driver.h"

#include <dlfcn.h>
#include <pthread.h>

#include "state/base.h"

static Driver calls;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static CUresult missing(void) { return CUDA_ERROR_NOT_FOUND; }

static void* look_up(typeof(&cuGetProcAddress) ask, const char* name, int version) {
  void* found = NULL;
  static bool told;
  if (ask && !ask(name, &found, version, 0, NULL) && found) return found;
  if (told) return missing;
  told = true;
  message(
      "dlsym and cuGetProcAddress do not find %s: a library in LD_PRELOAD that "
      "overrides them has to pass on what it does not know",
      name);
  return missing;
}

static void find(void) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  void* ask = library ? dlsym(library, "cuGetProcAddress_v2") : NULL;
#define CALL(name, version) calls.name = look_up(ask, #name, version);
  DRIVER_CALLS
#undef CALL
}

const Driver* driver(void) {
  pthread_once(&once, find);
  return &calls;
}
