// A program that reads its host's files on memory gets the device's figures instead.
// Without the headers of these calls, which may define them.
#undef _FORTIFY_SOURCE
#include <stdarg.h>
#include <string.h>
#include <unistd.h>

#include "state/state.h"

int (*open_meminfo)(void);

static int meminfo(const char* path) {
  if (!path || strcmp(path, "/proc/meminfo")) return -1;
  return open_meminfo ? open_meminfo() : -1;
}

#define OPEN(name)                                                      \
  EXPORT int name(const char* path, int flags, ...) {                   \
    static int (*next)(const char*, int, ...);                          \
    if (!next) next = (int (*)(const char*, int, ...))libc_call(#name); \
    int file = meminfo(path);                                           \
    if (file >= 0) return file;                                         \
    va_list list;                                                       \
    va_start(list, flags);                                              \
    unsigned mode = va_arg(list, unsigned);                             \
    va_end(list);                                                       \
    return next(path, flags, mode);                                     \
  }

#define FOPEN(name)                                                            \
  EXPORT FILE* name(const char* path, const char* mode) {                      \
    static FILE* (*next)(const char*, const char*);                            \
    if (!next) next = (FILE * (*)(const char*, const char*)) libc_call(#name); \
    int file = meminfo(path);                                                  \
    return file >= 0 ? fdopen(file, mode) : next(path, mode);                  \
  }

OPEN(open)
OPEN(open64)
FOPEN(fopen)
FOPEN(fopen64)
