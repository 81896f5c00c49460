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

// Copies of a batch have no order among themselves; here they have that of the array.
static CUresult copy_batch(const CUdeviceptr* to, const CUdeviceptr* from,
                           const size_t* size, size_t n,
                           const CUmemcpyAttributes* attribute, const size_t* first,
                           size_t attributes, size_t* failed, CUstream stream) {
  *failed = SIZE_MAX;
  bool legacy = !stream || stream == CU_STREAM_LEGACY;
  if (legacy || !to || !from || !size || !attribute || !first || !attributes ||
      attributes > n || first[0])
    return CUDA_ERROR_INVALID_VALUE;
  bool during_call = false;
  for (size_t i = 0; i < attributes; i++) {
    CUmemcpySrcAccessOrder order = attribute[i].srcAccessOrder;
    if (order < CU_MEMCPY_SRC_ACCESS_ORDER_STREAM ||
        order > CU_MEMCPY_SRC_ACCESS_ORDER_ANY || first[i] >= n ||
        (i && first[i] <= first[i - 1]))
      return CUDA_ERROR_INVALID_VALUE;
    during_call |= order == CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
  }
  for (size_t i = 0; i < n; i++) {
    CUresult error = copy((void*)to[i], (void*)from[i], size[i], stream);
    if (!error) continue;
    *failed = i;
    return error;
  }
  return during_call ? stream_finish(stream_find(stream)) : CUDA_SUCCESS;
}

// The header has the version of its CUDA under this name; a program may ask for either.
#undef cuMemcpyBatchAsync
EXPORT CUresult cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, size_t* size,
                                   size_t n, CUmemcpyAttributes* attribute,
                                   size_t* first, size_t attributes, size_t* failed,
                                   CUstream stream) {
  DRV_ENTER(n);
  size_t index;
  return copy_batch(to, from, size, n, attribute, first, attributes,
                    failed ? failed : &index, stream);
}

EXPORT CUresult cuMemcpyBatchAsync_v2(CUdeviceptr* to, CUdeviceptr* from, size_t* size,
                                      size_t n, CUmemcpyAttributes* attribute,
                                      size_t* first, size_t attributes,
                                      CUstream stream) {
  DRV_ENTER(n);
  size_t index;
  return copy_batch(to, from, size, n, attribute, first, attributes, &index, stream);
}

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
