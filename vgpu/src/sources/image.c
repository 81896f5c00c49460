// What a program's images were compiled for. Host code chooses by it (CUB its tuning),
// and knows only the architectures that it was compiled for: on a card between two of
// them it has to hear the lower one, as from a driver.
#include <stdint.h>
#include <string.h>

#include "sources/sources.h"

#define WRAPPER 0x466243b1u  // what __cudaRegisterFatBinary is given
#define CONTAINER 0xba55ed50u
enum { PTX = 1, ELF = 2 };

struct wrapper {
  uint32_t magic, version;
  const struct container* container;
};

struct container {
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t bytes;  // of the entries that follow
};

struct entry {
  uint16_t kind, unknown;
  uint32_t header_bytes;
  uint64_t bytes;
  uint32_t compressed_bytes, unknown2;
  uint16_t minor_version, major_version;
  uint32_t architecture;  // 86 for 8.6
};

int image_architecture(const void* image, int card) {
  const struct wrapper* wrapper = image;
  if (!wrapper || wrapper->magic != WRAPPER) return card;
  const struct container* container = wrapper->container;
  if (!container || container->magic != CONTAINER) return card;
  const char* at = (const char*)container + container->header_bytes;
  const char* end = at + container->bytes;
  int compiled = 0, portable = 0;
  while (at + sizeof(struct entry) <= end) {
    struct entry entry;
    memcpy(&entry, at, sizeof entry);
    int is = (int)entry.architecture;
    if (entry.kind == ELF && is / 10 == card / 10 && is <= card && is > compiled)
      compiled = is;
    if (entry.kind == PTX && is <= card && is > portable) portable = is;
    if (!entry.header_bytes) break;
    at += entry.header_bytes + entry.bytes;
  }
  return compiled ? compiled : portable ? portable : card;
}
