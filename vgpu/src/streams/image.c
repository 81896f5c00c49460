// What ptxas wrote into an ELF image: the stack that its kernels need (section
// .nv.info; cuobjdump -res-usage prints it), and their names (each has a bank of
// constants).
#include <elf.h>
#include <stdlib.h>
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

typedef struct {
  const unsigned char* start;
  const Elf64_Shdr* section;
  int sections;
  const char* names;
} Image;

static bool image_read(const void* image, Image* of) {
  const unsigned char* start = image;
  Elf64_Ehdr head;
  if (memcmp(start, ELFMAG, SELFMAG) || start[EI_CLASS] != ELFCLASS64) return false;
  memcpy(&head, start, sizeof head);
  const Elf64_Shdr* section = (const Elf64_Shdr*)(start + head.e_shoff);
  const char* names = (const char*)start + section[head.e_shstrndx].sh_offset;
  *of = (Image){start, section, head.e_shnum, names};
  return true;
}

uint64_t image_stack(const void* image) {
  Image of;
  if (!image_read(image, &of)) return 0;
  for (int i = 0; i < of.sections; i++) {
    const Elf64_Shdr* section = &of.section[i];
    if (strcmp(of.names + section->sh_name, ".nv.info")) continue;
    const unsigned char* at = of.start + section->sh_offset;
    return largest(at, at + section->sh_size);
  }
  return 0;
}

int image_kernels(const void* image, char*** names) {
  static const char CONSTANTS[] = ".nv.constant0.";
  Image of;
  *names = NULL;
  if (!image_read(image, &of)) return -1;
  int n = 0;
  *names = calloc((size_t)of.sections + 1, sizeof **names);
  for (int i = 0; i < of.sections; i++) {
    const char* name = of.names + of.section[i].sh_name;
    if (strncmp(name, CONSTANTS, strlen(CONSTANTS))) continue;
    (*names)[n++] = strdup(name + strlen(CONSTANTS));
  }
  return n;
}
