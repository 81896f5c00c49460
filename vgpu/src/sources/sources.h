// What the sources ask of one another.
#pragma once

// ---- image.c

// Of the architectures that an image (as __cudaRegisterFatBinary is given it) was
// compiled for, the one that a card (89 for 8.9) runs; `card` if it cannot be read.
int image_architecture(const void* image, int card);

// ---- math.c

void* cublas_stream(const void* handle);
