// Copies and fills, by a stream or at once.
#include "state/context.h"
#include "streams/stream.h"

static CUresult copy(void* to, const void* from, size_t size, void* stream) {
  if (!size) return CUDA_SUCCESS;
  return stream_run(
      stream,
      &(Operation){
          .kind = NODE_COPY, .to = (uint64_t)to, .from = (uint64_t)from, .size = size});
}

// Returns when it is done.
static CUresult copy_now(void* to, const void* from, size_t size) {
  CUresult error = copy(to, from, size, NULL);
  return error ? error : stream_finish(NULL);
}

static CUresult fill(uint64_t to, uint64_t value, int value_bytes, size_t n,
                     void* stream) {
  if (!n) return CUDA_SUCCESS;
  return stream_run(stream, &(Operation){.kind = NODE_FILL,
                                         .to = to,
                                         .size = n,
                                         .value = value,
                                         .value_bytes = value_bytes});
}

EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t size,
                              enum cudaMemcpyKind kind) {
  (void)kind;
  RT_ENTER(size);
  RT(copy_now(to, from, size));
}

EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size,
                                   enum cudaMemcpyKind kind, cudaStream_t stream) {
  (void)kind;
  RT_ENTER(size);
  RT(copy(to, from, size, stream));
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from,
                                       int from_device, size_t size,
                                       cudaStream_t stream) {
  (void)to_device;
  (void)from_device;
  RT_ENTER(size);
  RT(copy(to, from, size, stream));
}

EXPORT cudaError_t cudaMemcpyPeer(void* to, int to_device, const void* from,
                                  int from_device, size_t size) {
  (void)to_device;
  (void)from_device;
  RT_ENTER(size);
  RT(copy_now(to, from, size));
}

static CUresult copy_2d(char* to, size_t to_pitch, const char* from, size_t from_pitch,
                        size_t width, size_t height, void* stream) {
  CUresult error = CUDA_SUCCESS;
  for (size_t row = 0; row < height && !error; row++)
    error = copy(to + row * to_pitch, from + row * from_pitch, width, stream);
  return error;
}

EXPORT cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from,
                                     size_t from_pitch, size_t width, size_t height,
                                     enum cudaMemcpyKind kind, cudaStream_t stream) {
  (void)kind;
  RT_ENTER(width * height);
  RT(copy_2d(to, to_pitch, from, from_pitch, width, height, stream));
}

EXPORT cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from,
                                size_t from_pitch, size_t width, size_t height,
                                enum cudaMemcpyKind kind) {
  (void)kind;
  RT_ENTER(width * height);
  CUresult error = copy_2d(to, to_pitch, from, from_pitch, width, height, NULL);
  RT(error ? error : stream_finish(NULL));
}

EXPORT cudaError_t cudaMemset(void* to, int value, size_t n) {
  RT_ENTER(n);
  RT(fill((uint64_t)to, value & 0xff, 1, n, NULL));
}

EXPORT cudaError_t cudaMemsetAsync(void* to, int value, size_t n, cudaStream_t stream) {
  RT_ENTER(n);
  RT(fill((uint64_t)to, value & 0xff, 1, n, stream));
}

#define DRV_COPY(name, parameters, to, from)       \
  EXPORT CUresult name parameters {                \
    DRV_ENTER(size);                               \
    return copy_now((void*)to, (void*)from, size); \
  }
#define DRV_COPY_ASYNC(name, parameters, to, from)     \
  EXPORT CUresult name parameters {                    \
    DRV_ENTER(size);                                   \
    return copy((void*)to, (void*)from, size, stream); \
  }
DRV_COPY(cuMemcpy, (CUdeviceptr to, CUdeviceptr from, size_t size), to, from)
DRV_COPY(cuMemcpyDtoD, (CUdeviceptr to, CUdeviceptr from, size_t size), to, from)
DRV_COPY(cuMemcpyDtoH, (void* to, CUdeviceptr from, size_t size), to, from)
DRV_COPY(cuMemcpyHtoD, (CUdeviceptr to, const void* from, size_t size), to, from)
DRV_COPY_ASYNC(cuMemcpyAsync,
               (CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream), to,
               from)
DRV_COPY_ASYNC(cuMemcpyDtoDAsync,
               (CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream), to,
               from)
DRV_COPY_ASYNC(cuMemcpyDtoHAsync,
               (void* to, CUdeviceptr from, size_t size, CUstream stream), to, from)
DRV_COPY_ASYNC(cuMemcpyHtoDAsync,
               (CUdeviceptr to, const void* from, size_t size, CUstream stream), to,
               from)

#define DRV_FILL(name, type)                                   \
  EXPORT CUresult name(CUdeviceptr to, type value, size_t n) { \
    DRV_ENTER(n * sizeof value);                               \
    return fill(to, value, sizeof value, n, NULL);             \
  }
#define DRV_FILL_ASYNC(name, type)                                              \
  EXPORT CUresult name(CUdeviceptr to, type value, size_t n, CUstream stream) { \
    DRV_ENTER(n * sizeof value);                                                \
    return fill(to, value, sizeof value, n, stream);                            \
  }
DRV_FILL(cuMemsetD8, unsigned char)
DRV_FILL(cuMemsetD16, unsigned short)
DRV_FILL(cuMemsetD32, unsigned)
DRV_FILL_ASYNC(cuMemsetD8Async, unsigned char)
DRV_FILL_ASYNC(cuMemsetD16Async, unsigned short)
DRV_FILL_ASYNC(cuMemsetD32Async, unsigned)

EXPORT CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr to, cuuint32_t value,
                                     unsigned flags) {
  (void)flags;
  DRV_ENTER(sizeof value);
  return fill(to, value, sizeof value, 1, stream);
}
