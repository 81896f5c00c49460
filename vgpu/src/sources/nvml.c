// NVML: its figures for each device, a MIG instance and its parent, and
// the errors the configuration asks for. NVML sees every device of the run,
// whatever CUDA_VISIBLE_DEVICES says.
#include <fnmatch.h>
#include <string.h>
#include <strings.h>

#include "state/account.h"
#include "state/calls.h"

enum {
  OK = 0,
  UNINITIALIZED = 1,
  INVALID_ARGUMENT = 2,
  NOT_SUPPORTED = 3,
  NOT_FOUND = 6,
  INSUFFICIENT_SIZE = 7,
  VERSION_MISMATCH = 25,
};

// A handle is 1 + the device, for a MIG instance's parent 0x101 + the device.
typedef void* Handle;
enum { PARENT = 0x100 };

static bool is_handle(Handle handle) {
  uintptr_t n = (uintptr_t)handle & ~(uintptr_t)PARENT;
  return n >= 1 && n <= (uintptr_t)config.devices;
}

static int device_of(Handle handle) {
  return (int)(((uintptr_t)handle & ~(uintptr_t)PARENT) - 1);
}

static bool is_parent(Handle handle) { return (uintptr_t)handle & PARENT; }

static int enter(const char* call, Handle handle, bool has_handle) {
  if (!state_init()) return UNINITIALIZED;
  if (has_handle && !is_handle(handle)) return INVALID_ARGUMENT;
  if (config.trace) message("%s", call);
  call_made(call);
  char base[NAME_BYTES];
  snprintf(base, sizeof base, "%s", call);
  char* v = strrchr(base, '_');
  if (v && v[1] == 'v') *v = 0;
  for (int i = 0; i < config.nvml_errors; i++) {
    const NvmlError* e = &config.nvml_error[i];
    if (fnmatch(e->call, base, 0)) continue;
    if (e->device >= 0 && (!has_handle || e->device != device_of(handle))) continue;
    if (e->parent >= 0 && (!has_handle || e->parent != is_parent(handle))) continue;
    return e->error;
  }
  return injected(base, has_handle ? device_of(handle) : 0, 0);
}

#define ENTER()                                 \
  do {                                          \
    int entered = enter(__func__, NULL, false); \
    if (entered) return entered;                \
  } while (0)
#define ENTER_HANDLE(handle)                     \
  do {                                           \
    int entered = enter(__func__, handle, true); \
    if (entered) return entered;                 \
  } while (0)

EXPORT int nvmlInit_v2(void) {
  ENTER();
  return OK;
}
EXPORT int nvmlInit(void) { return nvmlInit_v2(); }
EXPORT int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  return nvmlInit_v2();
}
EXPORT int nvmlShutdown(void) {
  ENTER();
  return OK;
}

EXPORT const char* nvmlErrorString(int error) {
  static const char* const text[] = {
      [0] = "The operation was successful",
      [1] = "NVML was not first initialized with nvmlInit()",
      [2] = "A supplied argument is invalid",
      [3] = "The requested operation is not available on target device",
      [4] = "The current user does not have permission for operation",
      [6] = "A query to find an object was unsuccessful",
      [7] = "An input argument is not large enough",
      [9] = "NVIDIA driver is not loaded",
      [12] = "NVML Shared Library couldn't be found or loaded",
      [15] = "GPU is lost"};
  bool known = error >= 0 && error < (int)(sizeof text / sizeof *text) && text[error];
  return known ? text[error] : "Unknown Error";
}

EXPORT int nvmlDeviceGetCount_v2(unsigned* n) {
  ENTER();
  *n = (unsigned)config.devices;
  return OK;
}
EXPORT int nvmlDeviceGetCount(unsigned* n) { return nvmlDeviceGetCount_v2(n); }

static Handle top_handle(int device) {
  uintptr_t parent = config.device[device].mig_uuid[0] ? PARENT : 0;
  return (Handle)(parent + 1 + (uintptr_t)device);
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle* handle) {
  ENTER();
  if (index >= (unsigned)config.devices) return INVALID_ARGUMENT;
  *handle = top_handle((int)index);
  return OK;
}
EXPORT int nvmlDeviceGetHandleByIndex(unsigned index, Handle* handle) {
  return nvmlDeviceGetHandleByIndex_v2(index, handle);
}

EXPORT int nvmlDeviceGetHandleByUUID(const char* uuid, Handle* handle) {
  ENTER();
  for (int i = 0; i < config.devices; i++) {
    const DeviceConfig* d = &config.device[i];
    bool instance = d->mig_uuid[0] && !strcmp(uuid, d->mig_uuid);
    if (!instance && strcmp(uuid, d->uuid)) continue;
    *handle = instance ? (Handle)(uintptr_t)(i + 1) : top_handle(i);
    return OK;
  }
  return NOT_FOUND;
}

// NVML writes the domain with eight digits, CUDA with four: compare the rest.
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char* pci, Handle* handle) {
  ENTER();
  const char* wanted = strchr(pci, ':');
  for (int i = 0; wanted && i < config.devices; i++) {
    if (strcasecmp(strchr(config.device[i].pci, ':'), wanted)) continue;
    *handle = top_handle(i);
    return OK;
  }
  return NOT_FOUND;
}
EXPORT int nvmlDeviceGetHandleByPciBusId(const char* pci, Handle* handle) {
  return nvmlDeviceGetHandleByPciBusId_v2(pci, handle);
}

static int text_out(const char* text, char* to, unsigned n) {
  if (strlen(text) >= n) return INSUFFICIENT_SIZE;
  strcpy(to, text);
  return OK;
}

EXPORT int nvmlDeviceGetName(Handle handle, char* to, unsigned n) {
  ENTER_HANDLE(handle);
  return text_out(config.device[device_of(handle)].name, to, n);
}

EXPORT int nvmlDeviceGetUUID(Handle handle, char* to, unsigned n) {
  ENTER_HANDLE(handle);
  const DeviceConfig* d = &config.device[device_of(handle)];
  return text_out(d->mig_uuid[0] && !is_parent(handle) ? d->mig_uuid : d->uuid, to, n);
}

EXPORT int nvmlDeviceGetIndex(Handle handle, unsigned* index) {
  ENTER_HANDLE(handle);
  *index = (unsigned)device_of(handle);
  return OK;
}

EXPORT int nvmlDeviceGetMinorNumber(Handle handle, unsigned* minor) {
  ENTER_HANDLE(handle);
  *minor = (unsigned)device_of(handle);
  return OK;
}

typedef struct {
  char legacy[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char bus_id[32];
} PciInfo;

static int pci_info(Handle handle, void* to, size_t bytes) {
  const char* text = config.device[device_of(handle)].pci;
  PciInfo pci = {0};
  snprintf(pci.legacy, sizeof pci.legacy, "%.12s", text);
  snprintf(pci.bus_id, sizeof pci.bus_id, "0000%.24s", text);
  sscanf(text, "%x:%x:%x", &pci.domain, &pci.bus, &pci.device);
  memcpy(to, &pci, bytes);
  return OK;
}

EXPORT int nvmlDeviceGetPciInfo_v3(Handle handle, void* to) {
  ENTER_HANDLE(handle);
  return pci_info(handle, to, sizeof(PciInfo));
}
// What callers of the older ones have room for.
EXPORT int nvmlDeviceGetPciInfo_v2(Handle handle, void* to) {
  ENTER_HANDLE(handle);
  return pci_info(handle, to, offsetof(PciInfo, bus_id));
}
EXPORT int nvmlDeviceGetPciInfo(Handle handle, void* to) {
  ENTER_HANDLE(handle);
  return pci_info(handle, to, offsetof(PciInfo, subsystem_id));
}

typedef struct {
  unsigned long long total, free, used;
} MemoryInfo;

static MemoryInfo memory_info(Handle handle) {
  int i = device_of(handle);
  const DeviceConfig* d = &config.device[i];
  uint64_t total = is_parent(handle) ? d->mig_parent_total : d->nvml_total;
  uint64_t used = MIN(d->nvml_own_use ? run_used(i) : device_used(i), total);
  return (MemoryInfo){total, total - used, used};
}

EXPORT int nvmlDeviceGetMemoryInfo(Handle handle, MemoryInfo* info) {
  ENTER_HANDLE(handle);
  *info = memory_info(handle);
  return OK;
}

typedef struct {
  unsigned version;
  unsigned long long total, reserved, free, used;
} MemoryInfo2;

EXPORT int nvmlDeviceGetMemoryInfo_v2(Handle handle, MemoryInfo2* info) {
  ENTER_HANDLE(handle);
  MemoryInfo m = memory_info(handle);
  info->total = m.total;
  info->reserved = 0;
  info->free = m.free;
  info->used = m.used;
  return OK;
}

EXPORT int nvmlDeviceGetCudaComputeCapability(Handle handle, int* major, int* minor) {
  ENTER_HANDLE(handle);
  *major = config.device[device_of(handle)].major;
  *minor = config.device[device_of(handle)].minor;
  return OK;
}

EXPORT int nvmlSystemGetDriverVersion(char* to, unsigned n) {
  ENTER();
  return text_out("580.00", to, n);
}

EXPORT int nvmlSystemGetNVMLVersion(char* to, unsigned n) {
  ENTER();
  return text_out("13.580.00", to, n);
}

EXPORT int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  ENTER();
  *version = config.driver_version;
  return OK;
}
EXPORT int nvmlSystemGetCudaDriverVersion(int* version) {
  return nvmlSystemGetCudaDriverVersion_v2(version);
}

// No device can reach another, see cudaDeviceCanAccessPeer.
EXPORT int nvmlDeviceGetP2PStatus(Handle handle, Handle peer, int index, int* status) {
  (void)index;
  ENTER_HANDLE(handle);
  if (!is_handle(peer)) return INVALID_ARGUMENT;
  *status = device_of(handle) == device_of(peer) ? 0 : 1;  // CHIPSET_NOT_SUPPORTED
  return OK;
}

// ---- MIG

EXPORT int nvmlDeviceGetMigMode(Handle handle, unsigned* now, unsigned* pending) {
  ENTER_HANDLE(handle);
  if (!is_parent(handle) && config.device[device_of(handle)].mig_uuid[0])
    return INVALID_ARGUMENT;
  *now = *pending = is_parent(handle);
  return OK;
}

EXPORT int nvmlDeviceIsMigDeviceHandle(Handle handle, unsigned* is) {
  ENTER_HANDLE(handle);
  *is = !is_parent(handle) && config.device[device_of(handle)].mig_uuid[0];
  return OK;
}

EXPORT int nvmlDeviceGetMaxMigDeviceCount(Handle handle, unsigned* n) {
  ENTER_HANDLE(handle);
  *n = is_parent(handle);
  return OK;
}

EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(Handle handle, unsigned index,
                                               Handle* instance) {
  ENTER_HANDLE(handle);
  if (!is_parent(handle) || index) return NOT_FOUND;
  *instance = (Handle)((uintptr_t)handle & ~(uintptr_t)PARENT);
  return OK;
}

EXPORT int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Handle handle, Handle* parent) {
  ENTER_HANDLE(handle);
  if (is_parent(handle) || !config.device[device_of(handle)].mig_uuid[0])
    return INVALID_ARGUMENT;
  *parent = top_handle(device_of(handle));
  return OK;
}

static int instance_id(Handle handle, unsigned* id) {
  if (is_parent(handle) || !config.device[device_of(handle)].mig_uuid[0])
    return NOT_SUPPORTED;
  *id = 1;
  return OK;
}

EXPORT int nvmlDeviceGetGpuInstanceId(Handle handle, unsigned* id) {
  ENTER_HANDLE(handle);
  return instance_id(handle, id);
}

EXPORT int nvmlDeviceGetComputeInstanceId(Handle handle, unsigned* id) {
  ENTER_HANDLE(handle);
  return instance_id(handle, id);
}

// ---- processes of the run that have a context on the device

typedef struct {
  unsigned pid;
  unsigned long long used;
} ProcessInfo1;

typedef struct {
  unsigned pid;
  unsigned long long used;
  unsigned gpu_instance, compute_instance;
} ProcessInfo2;

typedef enum { COMPUTE, MPS, GRAPHICS } Use;

static int list_processes(Handle handle, Use use, bool first, unsigned* n, void* to) {
  int device = device_of(handle);
  bool wanted = use == (config.device[device].mps ? MPS : COMPUTE);
  unsigned found = 0, room = *n;
  state_lock();
  for (int i = 0; wanted && i < MAX_PROCESSES; i++) {
    const Process* p = &shared->process[i];
    if (!p->pid || (!p->used[device] && !(p->contexts >> device & 1))) continue;
    unsigned pid = (unsigned)p->pid;
    if (found < room && first)
      ((ProcessInfo1*)to)[found] = (ProcessInfo1){pid, p->used[device]};
    else if (found < room)
      ((ProcessInfo2*)to)[found] = (ProcessInfo2){pid, p->used[device], ~0u, ~0u};
    found++;
  }
  state_unlock();
  *n = found;
  return found > room ? INSUFFICIENT_SIZE : OK;
}

#define PROCESSES(call, use, first)                       \
  EXPORT int call(Handle handle, unsigned* n, void* to) { \
    ENTER_HANDLE(handle);                                 \
    return list_processes(handle, use, first, n, to);     \
  }
// Only the first version gives the first struct.
#define VERSIONS(call, use)        \
  PROCESSES(call, use, true)       \
  PROCESSES(call##_v2, use, false) \
  PROCESSES(call##_v3, use, false)

VERSIONS(nvmlDeviceGetComputeRunningProcesses, COMPUTE)
VERSIONS(nvmlDeviceGetMPSComputeRunningProcesses, MPS)
VERSIONS(nvmlDeviceGetGraphicsRunningProcesses, GRAPHICS)

EXPORT int nvmlDeviceGetUtilizationRates(Handle handle, unsigned rates[2]) {
  ENTER_HANDLE(handle);
  rates[0] = rates[1] = 0;
  return OK;
}

// ---- NVLink fabric: no device has one

typedef struct {
  unsigned version;
  unsigned char cluster[16];
  int status;
  unsigned clique;
  unsigned char state;
  unsigned health;
} FabricInfo2;

typedef struct {
  FabricInfo2 info;
  unsigned char summary;
} FabricInfo3;

EXPORT int nvmlDeviceGetGpuFabricInfoV(Handle handle, FabricInfo2* info) {
  ENTER_HANDLE(handle);
  if (!info) return INVALID_ARGUMENT;
  unsigned version = info->version;
  if (version == (3u << 24 | sizeof(FabricInfo3)))
    *(FabricInfo3*)info = (FabricInfo3){0};
  else if (version == (2u << 24 | sizeof(FabricInfo2)))
    *info = (FabricInfo2){0};  // its state: not supported
  else
    return VERSION_MISMATCH;
  info->version = version;
  return OK;
}
