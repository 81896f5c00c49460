// The stack that a kernel needs, as ptxas wrote it into its ELF image (section
// .nv.info; cuobjdump -res-usage prints it).
#include <elf.h>
#include <string.h>

#include "streams/stream.h"

enum { WITH_SIZE = 4, MIN_STACK_SIZE = 0x12 };

// The largest of a section's entries.
static uint64_t largest(const unsigned char* at, const unsigned char* end) {
  uint64_t bytes = 0;
  while (at + 4 <= end) {
    const int form = at[0], attribute = at[1];
    uint16_t size;
    memcpy(&size, at + 2, sizeof size);
    at += 4;
    if (form != WITH_SIZE) continue;  // the value lies in its head
    uint32_t entry[2];                // the function's symbol, and bytes
    if (attribute == MIN_STACK_SIZE && size >= sizeof entry && at + size <= end) {
      memcpy(entry, at, sizeof entry);
      if (entry[1] > bytes) bytes = entry[1];
    }
    at += size;
  }
  return bytes;
}

uint64_t image_stack(const void* image) {
  const unsigned char* start = image;
  Elf64_Ehdr head;
  if (memcmp(start, ELFMAG, SELFMAG) || start[EI_CLASS] != ELFCLASS64) return 0;
  memcpy(&head, start, sizeof head);
  const Elf64_Shdr* sections = (const Elf64_Shdr*)(start + head.e_shoff);
  const char* names = (const char*)start + sections[head.e_shstrndx].sh_offset;
  for (int i = 0; i < head.e_shnum; i++) {
    if (strcmp(names + sections[i].sh_name, ".nv.info")) continue;
    const unsigned char* at = start + sections[i].sh_offset;
    return largest(at, at + sections[i].sh_size);
  }
  return 0;
}
