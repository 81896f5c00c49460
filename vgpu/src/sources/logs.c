// Callbacks for the driver's log of errors: known until they are unregistered, never
// called. The device writes errors to stderr. Without CUDA's headers, which have
// these calls since 12.9.
#include "state/base.h"
#include "state/objects.h"

enum { OK = 0, INVALID_VALUE = 1 };

typedef void (*LogCallback)(void* data, int level, char* message, size_t length);

EXPORT int cuLogsRegisterCallback(LogCallback callback, void* data, void** registered) {
  (void)data;
  if (!callback) return INVALID_VALUE;
  void* handle = object_new(LOG_CALLBACK, 1);
  if (registered) *registered = handle;
  return OK;
}

EXPORT int cuLogsUnregisterCallback(void* registered) {
  return object_delete(registered, LOG_CALLBACK) ? OK : INVALID_VALUE;
}
