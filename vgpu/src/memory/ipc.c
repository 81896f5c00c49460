// Memory of cudaMalloc that another process opens by a handle, with its contents. What
// is opened is charged where it was allocated.
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "memory/memory.h"
#include "state/calls.h"
#include "state/config.h"
#include "state/context.h"
#include "state/state.h"

// What a handle holds.
typedef struct {
  char kind[8];
  ProcessId process;
  int device, file;  // of that process
  uint64_t inode;    // of the file, whose number may be another's by now
  uint64_t size;     // of the whole block
  uint64_t offset;   // of the allocation in it
} Handle;
_Static_assert(sizeof(Handle) <= sizeof(CUipcMemHandle), "a handle has 64 bytes");

static const char KIND[8] = "vgpu-ipc";

// A block that this process has opened: the owner of its mapping.
typedef struct {
  uint64_t inode;
  int references;
} Opened;

static CUresult export_memory(void* handle, uint64_t address) {
  if (!handle) return CUDA_ERROR_INVALID_VALUE;
  Handle e = {.process = process_id()};
  memcpy(e.kind, KIND, sizeof e.kind);
  CUresult error = CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&memory_lock);
  const Range* r = ranges_at(&mappings, address);
  const Mapping* m = r ? r->data : NULL;
  if (m && m->by == BY_MALLOC) {
    Physical* p = m->physical;
    struct stat file;
    error = physical_share(p) && !fstat(p->file, &file) ? CUDA_SUCCESS
                                                        : CUDA_ERROR_MAP_FAILED;
    if (!error) {
      e.device = p->device;
      e.file = p->file;
      e.inode = file.st_ino;
      e.size = p->size;
      e.offset = m->offset;
    }
  }
  pthread_mutex_unlock(&memory_lock);
  if (error) return error;
  memset(handle, 0, sizeof(CUipcMemHandle));
  memcpy(handle, &e, sizeof e);
  return CUDA_SUCCESS;
}

// The file of a handle; -1: the process or the allocation is gone.
static int open_file(const Handle* e) {
  char path[64];
  struct stat file;
  if (process_is_dead(&e->process)) return -1;
  snprintf(path, sizeof path, "/proc/%d/fd/%d", e->process.pid, e->file);
  int opened = open(path, O_RDWR | O_CLOEXEC);
  if (opened < 0) return -1;
  if (!fstat(opened, &file) && file.st_ino == e->inode &&
      (uint64_t)file.st_size == e->size)
    return opened;
  close(opened);
  return -1;
}

static Range* opened_before(const Handle* e) {
  for (Range* r = ranges_above(&mappings, 0); r;
       r = ranges_above(&mappings, r->start)) {
    const Mapping* m = r->data;
    if (m->by == BY_HANDLE && ((Opened*)m->owner)->inode == e->inode) return r;
  }
  return NULL;
}

static CUresult open_locked(const Handle* e, uint64_t* address) {
  Range* r = opened_before(e);
  if (r) {
    ((Opened*)((Mapping*)r->data)->owner)->references++;
    *address = r->start + e->offset;
    return CUDA_SUCCESS;
  }
  int file = open_file(e);
  if (file < 0) return CUDA_ERROR_INVALID_HANDLE;
  uint64_t start = address_take(round_up(e->size, 2ull << 20), 0);
  Physical* p = start ? physical_of_others(e->device, e->size) : NULL;
  if (!p || !physical_open(p, file)) {
    if (p) physical_give(p);
    if (start) address_give(start, round_up(e->size, 2ull << 20));
    close(file);
    return CUDA_ERROR_MAP_FAILED;
  }
  Opened* opened = malloc(sizeof *opened);
  if (!opened) abort();
  *opened = (Opened){e->inode, 1};
  Mapping* m = mapping_add(start, e->size, p);
  m->by = BY_HANDLE;
  m->owner = opened;
  *address = start + e->offset;
  return CUDA_SUCCESS;
}

static CUresult open_memory(uint64_t* address, const void* handle, unsigned flags) {
  Handle e;
  memcpy(&e, handle, sizeof e);
  if (!address || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS ||
      memcmp(e.kind, KIND, sizeof e.kind))
    return CUDA_ERROR_INVALID_VALUE;
  if (e.process.pid == process_id().pid) return CUDA_ERROR_INVALID_CONTEXT;
  if (e.device != current_device()) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  pthread_mutex_lock(&memory_lock);
  CUresult error = open_locked(&e, address);
  pthread_mutex_unlock(&memory_lock);
  return error;
}

static CUresult close_memory(uint64_t address) {
  pthread_mutex_lock(&memory_lock);
  Range* r = ranges_at(&mappings, address);
  Mapping* m = r ? r->data : NULL;
  bool right = m && m->by == BY_HANDLE;
  Opened* opened = right ? m->owner : NULL;
  if (right && !--opened->references) {
    uint64_t start = r->start, size = r->size;
    ranges_remove(&mappings, start);
    address_give(start, round_up(size, 2ull << 20));
    physical_give(m->physical);
    free(opened);
    free(m);
  }
  pthread_mutex_unlock(&memory_lock);
  return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

BOTH(cudaIpcGetMemHandle, cuIpcGetMemHandle, (cudaIpcMemHandle_t * handle, void* p),
     (CUipcMemHandle * handle, CUdeviceptr p), export_memory(handle, (uint64_t)p))
BOTH(cudaIpcOpenMemHandle, cuIpcOpenMemHandle,
     (void** p, cudaIpcMemHandle_t handle, unsigned flags),
     (CUdeviceptr * p, CUipcMemHandle handle, unsigned flags),
     open_memory((uint64_t*)p, &handle, flags))
BOTH(cudaIpcCloseMemHandle, cuIpcCloseMemHandle, (void* p), (CUdeviceptr p),
     close_memory((uint64_t)p))
