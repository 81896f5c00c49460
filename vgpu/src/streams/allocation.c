// Memory in the order of a stream: freed memory is there again for its own requests,
// and for those of others where nothing else is left. In a capture, nodes of its graph.
// And the calls that free memory once the device has done its work.
#include "memory/memory.h"
#include "state/context.h"
#include "state/driver.h"
#include "state/objects.h"
#include "state/state.h"
#include "streams/stream.h"

static bool is_capturing(const Stream* stream) { return stream && stream->capture; }

static CUresult capture_take(CUdeviceptr* address, size_t size, int device,
                             Stream* stream) {
  if (!size) return CUDA_ERROR_INVALID_VALUE;
  GraphAllocation* a;
  pthread_mutex_lock(&objects_lock);
  Capture* capture = stream->capture;
  CUresult error = capture->valid ? graph_memory_add(&capture->graph->memory, device,
                                                     size, stream, &a)
                                  : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (!error) {
    *address = a->address;
    error = capture_add(
        stream,
        &(Operation){
            .kind = NODE_ALLOCATE, .to = a->address, .size = size, .argument = a});
  }
  pthread_mutex_unlock(&objects_lock);
  return error;
}

static CUresult capture_free(CUdeviceptr address, Stream* stream) {
  GraphAllocation* own;
  pthread_mutex_lock(&objects_lock);
  Capture* capture = stream->capture;
  CUresult error = capture->valid ? graph_memory_add_free(&capture->graph->memory,
                                                          address, stream, &own)
                                  : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (error)
    capture->valid = false;
  else
    error = capture_add(
        stream, &(Operation){.kind = NODE_FREE, .to = address, .argument = own});
  pthread_mutex_unlock(&objects_lock);
  return error;
}

static CUresult take(CUdeviceptr* address, size_t size, CUmemoryPool pool,
                     CUstream handle) {
  Stream* stream = stream_is(handle) ? stream_find(handle) : NULL;
  if (is_capturing(stream))
    return capture_take(address, size, pool_device(pool), stream);
  uint64_t start;
  CUresult error = stream_is(handle) ? stream_finish_frees(stream) : CUDA_SUCCESS;
  if (!error) error = pool_allocate(pool, size, &start);
  if (error == CUDA_ERROR_OUT_OF_MEMORY && config.streams_behind) {
    error = device_finish();
    if (!error) error = pool_allocate(pool, size, &start);
  }
  if (!error) *address = start;
  return error;
}

EXPORT CUresult cuMemAllocAsync(CUdeviceptr* address, size_t size, CUstream stream) {
  DRV_ENTER(size);
  return take(address, size, pool_of(current_ordinal()), stream);
}

EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr* address, size_t size,
                                        CUmemoryPool pool, CUstream stream) {
  DRV_ENTER(size);
  return take(address, size, pool, stream);
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
  DRV_ENTER(0);
  Stream* stream = stream_is(handle) ? stream_find(handle) : NULL;
  if (is_capturing(stream)) return capture_free(address, stream);
  GraphAllocation* held = graph_memory_release(NULL, address);
  if (!held && !config.streams_behind) return memory_free_either(address);
  if (held || pool_free_later(address))
    return operation_post(
        stream, &(Operation){.kind = NODE_FREE, .to = address, .argument = held});
  CUresult error = stream_finish(stream);
  return error ? error : memory_free_either(address);
}

EXPORT cudaError_t cudaMallocAsync(void** address, size_t size, cudaStream_t stream) {
  RT_ENTER(size);
  *address = NULL;
  RT(size ? driver()->cuMemAllocAsync((CUdeviceptr*)address, size, stream) : 0);
}

EXPORT cudaError_t cudaMallocFromPoolAsync(void** address, size_t size,
                                           cudaMemPool_t pool, cudaStream_t stream) {
  RT_ENTER(size);
  *address = NULL;
  if (!size) return cudaSuccess;
  RT(driver()->cuMemAllocFromPoolAsync((CUdeviceptr*)address, size, pool, stream));
}

EXPORT cudaError_t cudaFreeAsync(void* address, cudaStream_t stream) {
  RT_ENTER(0);
  RT(address ? driver()->cuMemFreeAsync((CUdeviceptr)address, stream) : 0);
}

// ---- freed at once, when the device has done its work

// Of either kind: cudaFree takes what cudaMallocAsync gave, too, and the reverse.
EXPORT cudaError_t cudaFree(void* address) {
  RT_ENTER(0);
  RT(address ? driver()->cuMemFree((CUdeviceptr)address) : 0);
}

EXPORT CUresult cuMemFree(CUdeviceptr address) {
  DRV_ENTER(0);
  CUresult error = unsafe_call();
  if (!error) error = device_finish();
  return error ? error : memory_free_either(address);
}

EXPORT cudaError_t cudaFreeHost(void* address) {
  RT_ENTER(0);
  RT(address ? driver()->cuMemFreeHost(address) : 0);
}

EXPORT CUresult cuMemFreeHost(void* address) {
  DRV_ENTER(0);
  CUresult error = device_finish();
  return error ? error : host_free(address);
}
