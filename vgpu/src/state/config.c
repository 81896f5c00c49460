// The run folder's `config` (lines "key value", written and checked by the
// launcher), and which of its devices CUDA_VISIBLE_DEVICES leaves.
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "state/state.h"

Config config;

static int visible[MAX_DEVICES], visible_count;

int visible_devices(void) { return visible_count; }
int device_index(int ordinal) { return visible[ordinal]; }

static char* config_text;

static const char* setting(const char* key) {
  size_t n = strlen(key);
  for (char* line = config_text; line; line = strchr(line, '\n')) {
    if (*line == '\n') line++;
    if (!strncmp(line, key, n) && line[n] == ' ') return line + n + 1;
  }
  return NULL;
}

static uint64_t number(const char* key) {
  const char* text = setting(key);
  return text ? strtoull(text, NULL, 0) : 0;
}

static void text(const char* key, char* to, size_t size) {
  const char* from = setting(key);
  size_t n = from ? strcspn(from, "\n") : 0;
  n = MIN(n, size - 1);
  if (n) memcpy(to, from, n);
  to[n] = 0;
}

static char* device_key(int device, const char* key) {
  static char full[128];  // only under init_lock
  snprintf(full, sizeof full, "%d.%s", device, key);
  return full;
}

static void read_device(int i, DeviceConfig* d) {
#define NUMBER(field) d->field = number(device_key(i, #field))
#define TEXT(field) text(device_key(i, #field), d->field, sizeof d->field)
  NUMBER(memory);
  NUMBER(meminfo_total);
  NUMBER(meminfo_free_limit);
  NUMBER(meminfo_free_stale);
  NUMBER(nvml_own_use);
  NUMBER(mps);
  NUMBER(properties_total);
  NUMBER(nvml_total);
  NUMBER(other);
  NUMBER(page_cache);
  NUMBER(context);
  NUMBER(graph);
  NUMBER(graph_node);
  NUMBER(first_graph);
  NUMBER(cublas_handle);
  NUMBER(module);
  NUMBER(kernel);
  NUMBER(local_memory);
  NUMBER(first_library);
  NUMBER(nccl_communicator);
  NUMBER(nccl_kernels);
  NUMBER(nccl_channels);
  NUMBER(nccl_p2p_channels);
  NUMBER(malloc_block);
  NUMBER(vmm_granularity);
  NUMBER(multicast_granularity);
  NUMBER(integrated);
  NUMBER(vmm_handle_offset);
  NUMBER(major);
  NUMBER(minor);
  NUMBER(sm_count);
  NUMBER(clock_khz);
  NUMBER(memory_clock_khz);
  NUMBER(bus_bits);
  NUMBER(l2_bytes);
  NUMBER(shared_optin);
  NUMBER(shared_per_sm);
  NUMBER(mig_parent_total);
  TEXT(name);
  TEXT(uuid);
  TEXT(pci);
  TEXT(mig_uuid);
#undef NUMBER
#undef TEXT
}

bool config_read(const char* folder) {
  char path[600];
  snprintf(path, sizeof path, "%s/config", folder);
  FILE* file = fopen(path, "r");
  if (!file) {
    message("cannot read %s: %s", path, strerror(errno));
    return false;
  }
  size_t room = 1 << 20;
  free(config_text);  // of the process that this one was forked from
  memset(&config, 0, sizeof config);
  config_text = malloc(room);
  size_t n = fread(config_text, 1, room - 1, file);
  config_text[n] = 0;
  fclose(file);
  config.devices = MIN((int)number("devices"), MAX_DEVICES);
  config.strict = number("strict");
  config.trace = number("trace");
  config.driver_version = (int)number("driver_version");
  config.synchronize_us = (int)number("synchronize_us");
  config.streams_behind = number("streams_behind");
  config.behind_queries = (int)number("behind_queries");
  config.behind_us = number("behind_us");
  text("timeline", config.timeline, sizeof config.timeline);
  text("report", config.report, sizeof config.report);
  for (int i = 0; i < config.devices; i++) read_device(i, &config.device[i]);
  char line[512], key[32];
  for (int i = 0; i < 64; i++) {
    snprintf(key, sizeof key, "nvml_error.%d", i);
    text(key, line, sizeof line);
    NvmlError* e = &config.nvml_error[i];
    if (sscanf(line, "%95s %d %d %d", e->call, &e->device, &e->parent, &e->error) != 4)
      break;
    config.nvml_errors = i + 1;
  }
  for (int i = 0; i < MAX_HOOKS; i++) {
    snprintf(key, sizeof key, "hook.%d", i);
    text(key, line, sizeof line);
    Hook* h = &config.hook[i];
    if (sscanf(line, "%95s %d %lu %lu %d %d %d %d", h->kernel, &h->argument, &h->bytes,
               &h->value, &h->value_bytes, &h->value_argument, &h->count_argument,
               &h->per_block) != 8)
      break;
    config.hooks = i + 1;
  }
  return true;
}

void config_read_schedule(Shared* to) {
  char key[32], line[512];
  for (int i = 0; i < MAX_RULES; i++) {
    snprintf(key, sizeof key, "inject.%d", i);
    text(key, line, sizeof line);
    Rule r = {0};
    if (sscanf(line, "%95s %d %lu %lu %lu %d", r.call, &r.device, &r.nth, &r.over,
               &r.times, &r.error) != 6)
      break;
    to->rule[to->rules++] = r;
  }
  for (int i = 0; i < MAX_MOVES; i++) {
    snprintf(key, sizeof key, "move.%d", i);
    text(key, line, sizeof line);
    Move m = {0};
    if (sscanf(line, "%d %ld %lu %95s", &m.device, &m.bytes, &m.at_allocation,
               m.at_phase) < 3)
      break;
    to->move[to->moves++] = m;
  }
}

// ---- CUDA_VISIBLE_DEVICES: indices or the start of a GPU's or MIG's UUID

static int visible_match(const char* item, size_t n) {
  char* end;
  long index = strtol(item, &end, 10);
  if (n && end == item + n) return index < config.devices ? (int)index : -1;
  for (int i = 0; n > 4 && i < config.devices; i++) {
    const DeviceConfig* d = &config.device[i];
    if (!strncmp(d->uuid, item, n) || !strncmp(d->mig_uuid, item, n)) return i;
  }
  return -1;
}

void config_read_visible(void) {
  const char* list = getenv("CUDA_VISIBLE_DEVICES");
  visible_count = 0;
  if (!list) {
    for (int i = 0; i < config.devices; i++) visible[visible_count++] = i;
    return;
  }
  while (*list && visible_count < MAX_DEVICES) {
    size_t n = strcspn(list, ",");
    int match = visible_match(list, n);
    if (match < 0) break;  // as CUDA: what follows an invalid entry is invisible
    visible[visible_count++] = match;
    list += n;
    if (*list) list++;
  }
}
