// What the build generates: stubs.c.
#pragma once

typedef struct {
  const char *name, *symbol;
  int version;
} CallVersion;

extern const CallVersion call_version[];
extern const int call_versions;
extern const char* const call_name[];
extern const int call_class[];
extern const int calls;
extern int (*const late_stubs[])(void);
int late_stub(int index);
