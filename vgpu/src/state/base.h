// What every file uses. Without CUDA's headers: the generated stubs must not see
// their prototypes.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define EXPORT __attribute__((visibility("default")))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

// ---- message.c

void message(const char* format, ...) __attribute__((format(printf, 1, 2)));

// ---- load.c

// A call of the C library, past libraries that override it: theirs have no version.
// (dlsym may be theirs, and to it RTLD_NEXT is what follows them: our own dlopen.)
void* libc_call(const char* name);
