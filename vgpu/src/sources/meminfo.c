// What the host says of its memory, where an integrated device shares it.
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "state/account.h"
#include "state/context.h"

static int meminfo(void) {
  const char* unified =
      getenv("VGPU_UNIFIED");  // else a read makes no process of the run
  if (!unified || *unified != '1' || !state_init() || !visible_devices()) return -1;
  const DeviceConfig* d = &config.device[current_device()];
  if (!d->integrated) return -1;
  enter_host(current_device());
  uint64_t available = device_available(current_device());
  uint64_t cached = MIN(available, d->page_cache);
  char text[512];
  int n = snprintf(text, sizeof text,
                   "MemTotal: %lu kB\nMemFree: %lu kB\nMemAvailable: %lu kB\n"
                   "Buffers: 0 kB\nCached: %lu kB\nActive: 0 kB\nInactive: %lu kB\n"
                   "SwapTotal: 0 kB\nSwapFree: 0 kB\nShmem: 0 kB\nSlab: 0 kB\n",
                   d->memory >> 10, (available - cached) >> 10, available >> 10,
                   cached >> 10, cached >> 10);
  int file = memfd_create("meminfo", MFD_CLOEXEC);
  if (file >= 0 && write(file, text, (size_t)n) == n && !lseek(file, 0, SEEK_SET))
    return file;
  if (file >= 0) close(file);
  return -1;
}

__attribute__((constructor)) static void at_load(void) { open_meminfo = meminfo; }
