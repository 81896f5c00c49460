// Slices a GPU the way HAMi-core does, no larger than the tests need: preloaded, it
// overrides dlsym and cuGetProcAddress, lends the processes that share SLICE_FILE no
// more than SLICE_BYTES, and speaks of the slice where the driver and NVML would speak
// of the device. One device; the driver's own memory is not counted.
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

// ---- the calls that are overridden

static void* libc_dlsym(void* handle, const char* name) {
  static void* (*call)(void*, const char*);
  if (!call) call = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
  if (!call) call = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.17");
  if (!call) call = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
  return call(handle, name);
}

#define REAL(library, name)                                                      \
  ({                                                                             \
    static typeof(&name) call;                                                   \
    if (!call) call = libc_dlsym(dlopen(library, RTLD_NOW | RTLD_LOCAL), #name); \
    call;                                                                        \
  })
#define CUDA(name) REAL("libcuda.so.1", name)
#define NVML(name) REAL("libnvidia-ml.so.1", name)

// ---- the slice

enum { PROCESSES = 64, ALLOCATIONS = 1 << 16 };
typedef struct {
  pid_t pid;
  uint64_t used;
} Process;
static Process* processes;
static uint64_t limit;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void open_slice(void) {
  const char *bytes = getenv("SLICE_BYTES"), *path = getenv("SLICE_FILE");
  int file = path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
  size_t size = PROCESSES * sizeof *processes;
  if (bytes && file >= 0 && !ftruncate(file, (off_t)size))
    processes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (!processes || processes == MAP_FAILED) {
    fputs("slice: set SLICE_BYTES, and SLICE_FILE to a file to write\n", stderr);
    abort();
  }
  limit = strtoull(bytes, NULL, 10);
}

static bool lives(pid_t pid) { return pid && (!kill(pid, 0) || errno == EPERM); }

static uint64_t used(void) {
  uint64_t sum = 0;
  pthread_once(&once, open_slice);
  for (int i = 0; i < PROCESSES; i++)
    if (lives(processes[i].pid)) sum += processes[i].used;
  return sum;
}

static Process* own(void) {
  static Process* found;
  pthread_once(&once, open_slice);
  for (int i = 0; (!found || found->pid != getpid()) && i < PROCESSES; i++) {
    pid_t was = processes[i].pid;
    if (lives(was) || !__sync_bool_compare_and_swap(&processes[i].pid, was, getpid()))
      continue;
    found = &processes[i];
    found->used = 0;
  }
  return found;
}

static bool take(uint64_t bytes) {
  __sync_fetch_and_add(&own()->used, bytes);
  if (used() <= limit) return true;
  __sync_fetch_and_sub(&own()->used, bytes);
  return false;
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
  uint64_t key, bytes;  // an address or a handle
} held[ALLOCATIONS];
static int count;

// Memory charged before the driver was asked is kept, or returned.
static CUresult asked(CUresult error, uint64_t key, uint64_t bytes) {
  pthread_mutex_lock(&lock);
  if (count == ALLOCATIONS) abort();
  if (error) {
    __sync_fetch_and_sub(&own()->used, bytes);
  } else {
    held[count].key = key;
    held[count++].bytes = bytes;
  }
  pthread_mutex_unlock(&lock);
  return error;
}

static CUresult freed(CUresult error, uint64_t key) {
  pthread_mutex_lock(&lock);
  for (int i = 0; !error && i < count; i++) {
    if (held[i].key != key) continue;
    __sync_fetch_and_sub(&own()->used, held[i].bytes);
    held[i] = held[--count];
    break;
  }
  pthread_mutex_unlock(&lock);
  return error;
}

// ---- driver

CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t size) {
  if (!take(size)) return CUDA_ERROR_OUT_OF_MEMORY;
  CUresult error = CUDA(cuMemAlloc_v2)(address, size);
  return asked(error, *address, size);
}

CUresult cuMemFree_v2(CUdeviceptr address) {
  return freed(CUDA(cuMemFree_v2)(address), address);
}

CUresult cuMemAllocAsync(CUdeviceptr* address, size_t size, CUstream stream) {
  if (!take(size)) return CUDA_ERROR_OUT_OF_MEMORY;
  CUresult error = CUDA(cuMemAllocAsync)(address, size, stream);
  return asked(error, *address, size);
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
  return freed(CUDA(cuMemFreeAsync)(address, stream), address);
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size,
                     const CUmemAllocationProp* properties, unsigned long long flags) {
  if (!take(size)) return CUDA_ERROR_OUT_OF_MEMORY;
  CUresult error = CUDA(cuMemCreate)(handle, size, properties, flags);
  return asked(error, *handle, size);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  return freed(CUDA(cuMemRelease)(handle), handle);
}

CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
  CUresult error = CUDA(cuMemGetInfo_v2)(free_bytes, total);
  uint64_t bytes = used();
  *free_bytes = limit - bytes;
  *total = limit;
  return error;
}

CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  CUresult error = CUDA(cuDeviceTotalMem_v2)(bytes, device);
  pthread_once(&once, open_slice);
  *bytes = limit;
  return error;
}

// ---- NVML

typedef struct {
  unsigned long long total, free, used;
} Memory;
typedef struct {
  unsigned version;
  unsigned long long total, reserved, free, used;
} Memory2;
typedef struct {
  unsigned pid;
  unsigned long long used;
  unsigned gpu_instance, compute_instance;
} ProcessInfo;

int nvmlDeviceGetMemoryInfo(void* device, Memory* memory) {
  int error = NVML(nvmlDeviceGetMemoryInfo)(device, memory);
  uint64_t bytes = used();
  *memory = (Memory){limit, limit - bytes, bytes};
  return error;
}

int nvmlDeviceGetMemoryInfo_v2(void* device, Memory2* memory) {
  int error = NVML(nvmlDeviceGetMemoryInfo_v2)(device, memory);
  uint64_t bytes = used();
  *memory = (Memory2){memory->version, limit, 0, limit - bytes, bytes};
  return error;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* n,
                                            ProcessInfo* infos) {
  unsigned room = *n, found = 0;
  (void)device;
  pthread_once(&once, open_slice);
  for (int i = 0; i < PROCESSES; i++) {
    Process p = processes[i];
    if (!lives(p.pid) || !p.used) continue;
    if (found < room) infos[found] = (ProcessInfo){(unsigned)p.pid, p.used, ~0u, ~0u};
    found++;
  }
  *n = found;
  return found > room ? 7 : 0;  // NVML_ERROR_INSUFFICIENT_SIZE
}

// ---- being found

CUresult cuGetProcAddress_v2(const char* name, void** function, int version,
                             cuuint64_t flags, CUdriverProcAddressQueryResult* status);

static const struct {
  const char *name, *symbol;
  void* call;
} calls[] = {
#define CALL(name, call) {name, #call, call}
    CALL("cuGetProcAddress", cuGetProcAddress_v2),
    CALL("cuMemAlloc", cuMemAlloc_v2),
    CALL("cuMemFree", cuMemFree_v2),
    CALL("cuMemAllocAsync", cuMemAllocAsync),
    CALL("cuMemFreeAsync", cuMemFreeAsync),
    CALL("cuMemCreate", cuMemCreate),
    CALL("cuMemRelease", cuMemRelease),
    CALL("cuMemGetInfo", cuMemGetInfo_v2),
    CALL("cuDeviceTotalMem", cuDeviceTotalMem_v2),
    CALL("", nvmlDeviceGetMemoryInfo),
    CALL("", nvmlDeviceGetMemoryInfo_v2),
    CALL("", nvmlDeviceGetComputeRunningProcesses_v3),
};
enum { CALLS = sizeof calls / sizeof *calls };

CUresult cuGetProcAddress_v2(const char* name, void** function, int version,
                             cuuint64_t flags, CUdriverProcAddressQueryResult* status) {
  CUresult error = CUDA(cuGetProcAddress_v2)(name, function, version, flags, status);
  for (int i = 0; !error && i < CALLS; i++)
    if (*name && !strcmp(calls[i].name, name)) *function = calls[i].call;
  return error;
}

// RTLD_NEXT is passed on from here, as HAMi-core does: it means what follows this
// library, not the caller.
void* dlsym(void* handle, const char* symbol) {
  for (int i = 0; i < CALLS; i++)
    if (!strcmp(calls[i].symbol, symbol)) return calls[i].call;
  return libc_dlsym(handle, symbol);
}
