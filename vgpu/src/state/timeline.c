// Every change of used bytes: its peaks, its line in the timeline, the report.
//
// Lines wait in the process's part of the shared state, so those of a process
// that is killed are written by whoever notices.
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "state/account.h"
#include "state/names.h"

static const double FLUSH_SECONDS = 0.1;

static void append(const char* path, const char* text, size_t n) {
  int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (file < 0) return;
  if (write(file, text, n) < 0) message("cannot write %s", path);
  close(file);
}

static void peaks(int device, const Process* by) {
  uint64_t used = shared->device[device].used + shared->device[device].other;
  shared->device[device].peak = MAX(shared->device[device].peak, used);
  for (int i = 0; i < shared->phases; i++) {
    Phase* phase = &shared->phase[i];
    if (!phase->open) continue;
    phase->peak[device] = MAX(phase->peak[device], used);
    if (!by) continue;
    uint64_t* mine = &((Process*)by)->phase_peak[i][device];
    *mine = MAX(*mine, by->used[device]);
  }
  if (by) {
    uint64_t* mine = &((Process*)by)->peak[device];
    *mine = MAX(*mine, by->used[device]);
  }
}

// A string as JSON wants it, cut to fit.
static void quote(const char* from, char* to, size_t size) {
  size_t n = 0;
  for (; *from && n + 3 < size; from++) {
    if (*from == '"' || *from == '\\') to[n++] = '\\';
    to[n++] = (unsigned char)*from < ' ' ? ' ' : *from;
  }
  to[n] = 0;
}

void timeline_event(int device, int64_t bytes, const char* cause, Process* by) {
  peaks(device, by);
  if (!config.timeline[0]) return;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  char phase[2 * NAME_BYTES] = "", line[640];
  if (shared->phase_now >= 0)
    quote(shared->phase[shared->phase_now].name, phase, sizeof phase);
  int n = snprintf(
      line, sizeof line,
      "{\"t\":%ld.%09ld,\"pid\":%d,\"device\":%d,\"cause\":\"%s\",\"bytes\":%ld,"
      "\"process_used\":%lu,\"used\":%lu,\"phase\":\"%s\"}\n",
      (long)now.tv_sec, now.tv_nsec, by ? by->pid : 0, device, cause, bytes,
      by ? by->used[device] : 0,
      shared->device[device].used + shared->device[device].other, phase);
  if (!by) {
    append(config.timeline, line, n);
    return;
  }
  if (by->timeline_bytes + n > TIMELINE_BYTES) timeline_flush(by);
  memcpy(by->timeline + by->timeline_bytes, line, n);
  by->timeline_bytes += n;
  static double flushed;  // under the state lock
  double seconds = (double)now.tv_sec + now.tv_nsec * 1e-9;
  if (seconds - flushed < FLUSH_SECONDS) return;
  flushed = seconds;
  timeline_flush(by);
}

void timeline_flush(Process* process) {
  if (process->timeline_bytes)
    append(config.timeline, process->timeline, process->timeline_bytes);
  process->timeline_bytes = 0;
}

// ---- the report

typedef struct {
  char text[1 << 16];
  size_t n;
} Text;

static void put(Text* text, const char* format, ...)
    __attribute__((format(printf, 2, 3)));
static void put(Text* text, const char* format, ...) {
  va_list list;
  va_start(list, format);
  size_t room = sizeof text->text - text->n;
  int n = vsnprintf(text->text + text->n, room, format, list);
  va_end(list);
  text->n += MIN((size_t)n, room - 1);
}

static void put_calls(Text* text, const Process* process, const char* between) {
  const char* comma = "";
  for (int i = 0; i < MIN(calls, MAX_CALLS); i++) {
    if (!process->calls[i] || call_class[i] == CALL_COMPUTES) continue;
    put(text, between, comma, call_name[i], process->calls[i]);
    comma = ", ";
  }
  for (int i = 0; i < MAX_LATE_CALLS && process->late_call[i][0]; i++) {
    if (!process->late_calls[i]) continue;
    put(text, between, comma, process->late_call[i], process->late_calls[i]);
    comma = ", ";
  }
}

void report_write(Process* process) {
  static Text text;  // under the state lock
  text.n = 0;
  put_calls(&text, process, "%s%s %u");
  if (text.n)
    message("process %d made calls that are not implemented: %s", process->pid,
            text.text);
  if (!config.report[0]) return;
  text.n = 0;
  put(&text,
      "{\"pid\": %d, \"kernels\": %lu, \"computed\": %lu, \"graph_launches\": %lu, "
      "\"devices\": [",
      process->pid, process->kernels, process->computed, process->graph_launches);
  for (int d = 0; d < config.devices; d++)
    put(&text,
        "%s{\"used\": %lu, \"peak\": %lu, \"device_used\": %lu, \"device_peak\": %lu, "
        "\"least_available\": %lu}",
        d ? ", " : "", process->used[d], process->peak[d],
        shared->device[d].used + shared->device[d].other, shared->device[d].peak,
        shared->device[d].least_available);
  put(&text, "], \"phases\": {");
  for (int i = 0; i < shared->phases; i++) {
    char name[2 * NAME_BYTES];
    quote(shared->phase[i].name, name, sizeof name);
    put(&text, "%s\"%s\": [", i ? ", " : "", name);
    for (int d = 0; d < config.devices; d++)
      put(&text, "%s{\"peak\": %lu, \"device_peak\": %lu}", d ? ", " : "",
          process->phase_peak[i][d], shared->phase[i].peak[d]);
    put(&text, "]");
  }
  put(&text, "}, \"not_implemented\": {");
  put_calls(&text, process, "%s\"%s\": %u");
  put(&text, "}, \"injected\": [");
  const char* comma = "";
  for (int i = 0; i < shared->rules; i++) {
    if (!process->fired[i]) continue;
    put(&text, "%s{\"call\": \"%s\", \"error\": %d, \"fired\": %u}", comma,
        shared->rule[i].call, shared->rule[i].error, process->fired[i]);
    comma = ", ";
  }
  put(&text, "]}\n");
  append(config.report, text.text, text.n);
}
