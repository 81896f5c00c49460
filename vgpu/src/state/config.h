// The configuration, read once from the run folder.
#pragma once

#include "state/base.h"

enum {
  MAX_DEVICES = 16,
  MAX_PROCESSES = 128,
  MAX_PHASES = 64,
  MAX_RULES = 64,
  MAX_MOVES = 64,
  MAX_CALLS = 8192,
  MAX_LATE_CALLS = 256,
  MAX_HOOKS = 32,
  NAME_BYTES = 96,
  TIMELINE_BYTES = 1 << 16,
};

typedef struct {
  uint64_t memory;  // bytes that can be allocated
  uint64_t meminfo_total, meminfo_free_limit, properties_total, nvml_total;
  bool meminfo_free_stale, nvml_own_use, mps;
  uint64_t other;       // held by other processes at the start
  uint64_t page_cache;  // of an integrated device's host, at most
  uint64_t context, graph, graph_node, first_graph, cublas_handle, module, kernel;
  uint64_t first_library, nccl_communicator, nccl_kernels;
  int nccl_channels, nccl_p2p_channels;
  uint64_t malloc_block, vmm_granularity;
  uint64_t multicast_granularity;  // recommended; 0: no multicast
  bool integrated, vmm_handle_offset, local_memory;
  int major, minor, sm_count, clock_khz, memory_clock_khz, bus_bits;
  uint64_t l2_bytes, shared_optin, shared_per_sm;
  char name[256], uuid[64], pci[32];
  char mig_uuid[64];  // empty: not a MIG instance
  uint64_t mig_parent_total;
} DeviceConfig;

typedef struct {
  char call[NAME_BYTES];
  int device;  // -1 any call
  int parent;  // -1 any handle, 0 the device or MIG instance, 1 a MIG parent
  int error;
} NvmlError;

typedef struct {
  char kernel[NAME_BYTES];
  int argument;
  uint64_t bytes;
  uint64_t value;
  int value_bytes;
  int value_argument;  // -1: `value` as given
  int count_argument;  // -1: `bytes` as given; else an int32 argument times it
  int per_block;       // and times the blocks of the launch
} Hook;

typedef struct {
  int devices;
  DeviceConfig device[MAX_DEVICES];
  bool strict, trace;
  int driver_version;
  int synchronize_us;  // what waiting for the device takes
  // Work of streams is done when it is waited for, after so many queries, or so long.
  bool streams_behind;
  int behind_queries;
  uint64_t behind_us;
  char timeline[1024], report[1024];
  int nvml_errors;
  NvmlError nvml_error[64];
  int hooks;
  Hook hook[MAX_HOOKS];
} Config;

extern Config config;

// False, and it says why, when the folder's `config` cannot be read.
bool config_read(const char* folder);
void config_read_visible(void);  // CUDA_VISIBLE_DEVICES
struct Shared;
void config_read_schedule(struct Shared* to);

int visible_devices(void);
int device_index(int ordinal);  // the configured device behind an ordinal
