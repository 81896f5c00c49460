// What is left of a device's memory. On an integrated device it is the host's, which
// processes use for themselves, too, unseen by CUDA: their anonymous resident pages.
// What CUDA hands out is mapped shared there, so that it is not among them.
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "state/account.h"

static uint64_t anonymous(pid_t pid) {
  char path[32], text[128];
  snprintf(path, sizeof path, "/proc/%d/statm", pid);
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;  // it has ended
  ssize_t n = read(file, text, sizeof text - 1);
  close(file);
  if (n <= 0) return 0;
  text[n] = 0;
  char* at = text;
  strtoull(at, &at, 10);  // the address space
  uint64_t resident = strtoull(at, &at, 10), shared_pages = strtoull(at, &at, 10);
  return (resident - MIN(resident, shared_pages)) * (uint64_t)sysconf(_SC_PAGESIZE);
}

static uint64_t plain(int device) {
  uint64_t bytes = 0;
  if (!config.device[device].integrated) return 0;
  for (int i = 0; i < MAX_PROCESSES; i++) {
    const Process* process = &shared->process[i];
    if (process->pid && process->hosts >> device & 1) bytes += anonymous(process->pid);
  }
  return bytes;
}

void enter_host(int device) {
  if (self) __atomic_fetch_or(&self->hosts, 1u << device, __ATOMIC_RELAXED);
}

uint64_t available_now(int device) {
  uint64_t memory = config.device[device].memory;
  uint64_t used = shared->device[device].used + shared->device[device].other;
  used += plain(device);
  uint64_t bytes = used > memory ? 0 : memory - used;
  note_available(device, bytes);
  return bytes;
}

void note_available(int device, uint64_t bytes) {
  uint64_t* least = &shared->device[device].least_available;
  *least = MIN(*least, bytes);
}
