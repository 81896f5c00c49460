// The virtual CUDA device: what its parts share.
//
// Locks, in the order they may be taken:
//   objects_lock  streams, events, graphs, modules   (stream.c)
//   memory_lock   addresses and physical memory      (memory.c)
//   state_lock    the state all processes share      (state.c)
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#define EXPORT __attribute__((visibility("default")))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

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

// ---- configuration, read once from the run folder (state.c)

typedef struct {
  uint64_t memory;  // bytes that can be allocated
  uint64_t meminfo_total, meminfo_free_limit, properties_total, nvml_total;
  bool meminfo_free_stale, nvml_own_use, mps;
  uint64_t other;  // held by other processes at the start
  uint64_t context, graph, graph_node, first_graph, cublas_handle, module, kernel;
  uint64_t nccl_communicator;
  uint64_t malloc_block, vmm_granularity;
  bool integrated, vmm_handle_offset;
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
  int count_argument;  // -1: `bytes` as given; else an int32 argument times it
} Hook;

typedef struct {
  int devices;
  DeviceConfig device[MAX_DEVICES];
  bool strict, trace;
  int driver_version;
  int synchronize_us;  // what waiting for the device takes
  char timeline[1024], report[1024];
  int nvml_errors;
  NvmlError nvml_error[64];
  int hooks;
  Hook hook[MAX_HOOKS];
} Config;

extern Config config;

// ---- what all processes of a run share (state.c)

typedef struct {
  char call[NAME_BYTES];
  int device;      // -1: any
  uint64_t nth;    // 0: any
  uint64_t over;   // only requests larger than this
  uint64_t times;  // how often it may still fire
  int error;
  uint64_t seen, fired;
} Rule;

typedef struct {
  int device;
  int64_t bytes;              // positive: another process takes, negative: gives
  uint64_t at_allocation;     // 0: not by count
  char at_phase[NAME_BYTES];  // empty: not by phase
  bool done;
} Move;

typedef struct {
  char name[NAME_BYTES];
  int open;
  int before;  // the phase it opened in, -1: none
  uint64_t peak[MAX_DEVICES];
} Phase;

typedef struct {
  pid_t pid;  // 0: free
  uint64_t used[MAX_DEVICES], peak[MAX_DEVICES];
  uint64_t phase_peak[MAX_PHASES][MAX_DEVICES];
  uint64_t pinned, pinned_peak;  // bytes of host memory
  uint64_t kernels, graph_launches;
  uint32_t fired[MAX_RULES];
  uint32_t calls[MAX_CALLS];
  char late_call[MAX_LATE_CALLS][NAME_BYTES];
  uint32_t late_calls[MAX_LATE_CALLS];
  uint32_t timeline_bytes;
  char timeline[TIMELINE_BYTES];
} Process;

typedef struct {
  uint64_t ready;
  pthread_mutex_t lock;
  struct {
    uint64_t used;  // by all processes of the run
    uint64_t other, peak, allocations;
  } device[MAX_DEVICES];
  int phases;
  int phase_now;  // index of the one opened last, -1: none
  Phase phase[MAX_PHASES];
  int rules, moves;
  Rule rule[MAX_RULES];
  Move move[MAX_MOVES];
  Process process[MAX_PROCESSES];
} Shared;

extern Shared* shared;
extern Process* self;

bool state_init(void);  // false: no run folder, or no device in it
void state_lock(void);
void state_unlock(void);
const char* run_folder(void);
bool forked_after_init(void);
bool process_ended(void);

// A process of the run, also after it has ended.
typedef struct {
  pid_t pid;
  int slot;
} ProcessId;

ProcessId process_id(void);  // this one
bool process_is_dead(const ProcessId* id);
int visible_devices(void);
int device_index(int ordinal);  // the configured device behind an ordinal

// Takes bytes of a device's memory, or gives them back (negative).
// False, and nothing is taken, when they do not fit.
bool charge(int device, int64_t bytes, const char* cause);
uint64_t device_used(int device);  // every process and the others
uint64_t run_used(int device);     // every process of the run
uint64_t device_free(int device);

// ---- timeline.c

void timeline_event(int device, int64_t bytes, const char* cause, Process* by);
void timeline_flush(Process* process);
void report_write(Process* process);

// ---- control.c

int injected(const char* call, int device, uint64_t size);
void moves_at_allocation(int device);
void pin(int64_t bytes);

// ---- ranges.c: address ranges in a balanced tree, every operation O(log n)

typedef struct Range {
  uint64_t start, size;
  void* data;
  uint64_t largest;  // size of the largest range below this node
  uint32_t weight;
  struct Range *left, *right;
} Range;

typedef struct {
  Range* root;
  uint64_t count;
} Ranges;

void ranges_add(Ranges* ranges, uint64_t start, uint64_t size, void* data);
void* ranges_remove(Ranges* ranges, uint64_t start);
Range* ranges_at(const Ranges* ranges, uint64_t address);     // containing it
Range* ranges_below(const Ranges* ranges, uint64_t address);  // start <= it
Range* ranges_above(const Ranges* ranges, uint64_t address);  // start > it
bool ranges_overlap(const Ranges* ranges, uint64_t start, uint64_t size);

// A heap is a set of free ranges; taking is first fit, giving back merges.
uint64_t heap_take(Ranges* heap, uint64_t size);  // UINT64_MAX: none fits
uint64_t heap_take_aligned(Ranges* heap, uint64_t size, uint64_t alignment);
void heap_give(Ranges* heap, uint64_t start, uint64_t size);

// ---- memory.c

typedef struct {
  int device;
  uint64_t size, offset;  // in the device's physical memory
  int references;
  uint64_t handle;  // of cuMemCreate
  int held;         // times the program holds the handle
  bool written;     // false: every byte is zero
  const char* cause;
  CUmemAllocationProp properties;
} Physical;

typedef struct {
  Physical* physical;
  uint64_t offset;  // in the physical memory
  bool readable, writable;
  enum { BY_MALLOC, BY_POOL, BY_MAP } by;
  uint64_t requested;
  void* owner;  // the pool
} Mapping;

extern pthread_mutex_t memory_lock;
extern Ranges mappings;  // device addresses that are backed
extern Ranges reserved;  // device addresses handed out

bool memory_init(void);
bool is_device_address(uint64_t address);
uint64_t address_take(uint64_t size, uint64_t alignment);  // 0: none
void address_give(uint64_t start, uint64_t size);
Physical* physical_take(int device, uint64_t size, const char* cause);
void physical_give(Physical* physical);  // one reference less
CUresult memory_allocate(int device, uint64_t size, const char* cause,
                         uint64_t* address);
CUresult memory_free(uint64_t address);
CUresult memory_copy(uint64_t to, uint64_t from, uint64_t size);
CUresult memory_fill(uint64_t to, uint64_t value, int value_bytes, uint64_t n);
bool memory_is_zero(uint64_t from, uint64_t size);  // false: it may be, or not

// ---- device.c

typedef struct CUctx_st {
  int ordinal;
  bool made;
} Context;

extern int sticky;  // the error that has ended this process's CUDA, or 0

cudaError_t rt_enter(const char* call, uint64_t size, bool needs_context);
cudaError_t rt_leave(cudaError_t error);
CUresult drv_enter(const char* call, uint64_t size, bool needs_context);
int current_ordinal(void);
int current_device(void);  // configured index
CUresult context_make(int ordinal);
CUresult context_usable(void);  // the error that a call in any context returns
CUresult context_enter(void);   // as a call that needs a context, or its error
CUresult device_wait(void);
void sticky_error(int error);

#define RT_ENTER(size)                                    \
  do {                                                    \
    cudaError_t entered = rt_enter(__func__, size, true); \
    if (entered) return entered;                          \
  } while (0)
#define DRV_ENTER(size)                                 \
  do {                                                  \
    CUresult entered = drv_enter(__func__, size, true); \
    if (entered) return entered;                        \
  } while (0)
#define RT(error) return rt_leave((cudaError_t)(error))

// ---- stream.c, graph.c

typedef enum {
  STREAM = 1,
  EVENT,
  GRAPH,
  NODE,
  EXEC,
  MODULE,
  KERNEL,
  COMMUNICATOR,
  COLLECTIVE,
  OTHER
} Kind;

void* object_new(Kind kind, size_t bytes);
bool object_is(const void* object, Kind kind);
bool object_delete(void* object, Kind kind);  // false: no such object

typedef enum {
  NODE_KERNEL,
  NODE_COPY,
  NODE_FILL,
  NODE_HOST,
  NODE_EVENT,
  NODE_EMPTY,
  NODE_COLLECTIVE,
} NodeKind;

typedef struct {
  NodeKind kind;
  uint64_t to, from, size, value;
  int value_bytes;
  void (*function)(void*);
  void* argument;
} Operation;

// Runs the operation now, or adds it to the graph the stream is capturing.
CUresult stream_run(void* stream, const Operation* operation);
// Error 900 and an ended capture, when a call that waits or allocates is made
// where CUDA forbids it.
CUresult unsafe_call(void);
CUresult operation_do(const Operation* operation);

// ---- module.c

const char* kernel_name(const void* kernel);
CUresult kernel_launch(const void* kernel, void** arguments, void* stream);

// ---- nccl.c

CUresult collective_do(void* batch);

// ---- image.c

// Of the architectures that an image (as __cudaRegisterFatBinary is given it) was
// compiled for, the one that a card (89 for 8.9) runs; `card` if it cannot be read.
int image_architecture(const void* image, int card);

// ---- load.c

// A call of the C library, past libraries that override it: theirs have no version.
// (dlsym may be theirs, and to it RTLD_NEXT is what follows them: our own dlopen.)
void* libc_call(const char* name);

// ---- calls.c: stand-ins nobody wrote, and finding calls by name

typedef enum { CALL_ERROR, CALL_IGNORED, CALL_COMPUTES } CallClass;

int call_stub(int index, void* first_argument);
void* entry_point(const char* name, int version);
CUresult not_implemented(const char* name);  // counts it; NOT_SUPPORTED
void* cublas_stream(const void* handle);
void message(const char* format, ...) __attribute__((format(printf, 1, 2)));
