// What the device says to the user, on stderr.
#include <stdarg.h>
#include <unistd.h>

#include "state/base.h"

void message(const char* format, ...) {
  char line[1024];
  int n = snprintf(line, sizeof line, "[vgpu] pid %d: ", getpid());
  va_list list;
  va_start(list, format);
  n += vsnprintf(line + n, sizeof line - n - 1, format, list);
  va_end(list);
  n = MIN(n, (int)sizeof line - 2);
  line[n++] = '\n';
  if (write(2, line, n) < 0) return;
}
