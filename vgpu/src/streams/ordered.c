// Memory in the order of a stream: what it freed is there again for its own requests,
// and for those of others where nothing else is left.
#include "memory/memory.h"
#include "state/context.h"
#include "state/state.h"
#include "streams/stream.h"

static CUresult take(CUdeviceptr* address, size_t size, CUmemoryPool pool,
                     CUstream handle) {
  uint64_t start;
  CUresult error =
      stream_is(handle) ? stream_finish_frees(stream_find(handle)) : CUDA_SUCCESS;
  if (!error) error = pool_take(pool, size, &start);
  if (error == CUDA_ERROR_OUT_OF_MEMORY && config.streams_behind) {
    error = finish_device();
    if (!error) error = pool_take(pool, size, &start);
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
  if (!config.streams_behind || (stream && stream->capture))
    return memory_free_either(address);
  if (pool_free_later(address))
    return operation_post(stream, &(Operation){.kind = NODE_FREE, .to = address});
  CUresult error = stream_finish(stream);
  return error ? error : memory_free_either(address);
}
