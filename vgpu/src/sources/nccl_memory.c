// The memory of NCCL's communicators, as NCCL 2.27.5 allocates it (2.30.7: the same
// sizes). Each allocation is one of the virtual memory calls, so it is rounded up to
// their unit: alloc.h, ncclCuMemAlloc. On a card whose channels are not known
// (nccl_channels is 0), only its nccl_communicator is charged.
#include "memory/memory.h"
#include "sources/communicator.h"
#include "state/account.h"

enum {
  LOW_LATENCY = 8 * 512 * 8 * 16,       // init.cc: DEFAULT_LL_BUFFSIZE
  LOW_LATENCY_128 = 120 * 640 * 8 * 8,  // DEFAULT_LL128_BUFFSIZE
  SIMPLE = 4 << 20,                     // DEFAULT_BUFFSIZE
  CONTROL = 4096,                       // comm.h: ncclSendMem, ncclRecvMem
  STACK = 1736,  // bytes a thread of its kernels for sm_90: cuobjdump -res-usage
  NVLS_BUFFER = 8 * 128 * 1024,  // nvls.cc: steps of NCCL_NVLS_CHUNKSIZE
  // NCCL weighs bandwidth against latency (graph/tuning.cc); NVLS wins somewhere near.
  NVLS_FROM = 1 << 20,
};

typedef enum { RING = 1, NVLS = 2 } Connection;

static uint64_t block(struct ncclComm* c, uint64_t size) {
  return round_up(size, config.device[c->device].vmm_granularity);
}

// nvls.cc, ncclNvlsInit: more than two GPUs, and cards that have multicast.
static uint64_t nvls_channels(struct ncclComm* c) {
  const DeviceConfig* d = &config.device[c->device];
  if (c->ranks <= 2 || !d->multicast_granularity) return 0;
  return d->major >= 10 ? 24 : 16;
}

// init.cc, devCommSetup: the communicator and its ranks. channel.cc, initChannel: three
// tables for each channel, of collectives or of peers; initNvlsChannel: one more for
// each of collectives. nvls.cc, ncclNvlsSetup: credits.
static uint64_t bytes_made(struct ncclComm* c) {
  const DeviceConfig* d = &config.device[c->device];
  if (!d->nccl_channels) return 0;
  uint64_t channels = d->nccl_channels, tables = 2;
  tables += 3 * MAX(channels, (uint64_t)d->nccl_p2p_channels);
  if (nvls_channels(c)) tables += channels + 1;
  return tables * block(c, 1);
}

// p2p.cc, p2pSendSetup and p2pRecvSetup: for each channel.
static uint64_t bytes_to_send(struct ncclComm* c) { return block(c, CONTROL); }
static uint64_t bytes_to_receive(struct ncclComm* c) {
  return block(c, CONTROL + LOW_LATENCY + LOW_LATENCY_128 + SIMPLE);
}

static bool take(struct ncclComm* c, uint64_t bytes) {
  if (!charge(c->device, (int64_t)bytes, "nccl")) return false;
  c->charged += (int64_t)bytes;
  return true;
}

static ncclResult_t refused(uint64_t bytes) {
  return nccl_fail(ncclUnhandledCudaError, "Failed to CUDA calloc %lu bytes", bytes);
}

ncclResult_t comm_take_memory(struct ncclComm* c) {
  static bool loaded[MAX_DEVICES];
  const DeviceConfig* d = &config.device[c->device];
  if (!charge_first_library(c->device)) return refused(d->first_library);
  if (!charge_once(c->device, d->nccl_kernels, "nccl kernels", loaded))
    return refused(d->nccl_kernels);
  uint64_t bytes = d->nccl_communicator + bytes_made(c);
  return take(c, bytes) ? ncclSuccess : refused(bytes);
}

void comm_give_memory(struct ncclComm* c) {
  if (!c->suspended) charge(c->device, -c->charged, "nccl");
}

ncclResult_t comm_suspend_memory(struct ncclComm* c, bool suspend) {
  if (suspend == c->suspended) return ncclSuccess;
  if (!charge(c->device, suspend ? -c->charged : c->charged, "nccl"))
    return refused((uint64_t)c->charged);
  c->suspended = suspend;
  return ncclSuccess;
}

// group.cc, ncclCollPreconnectFunc and ncclP2PPreconnectFunc: an algorithm is connected
// on all channels, a peer on all of its own, by the first who asks for it. NVSwitch
// gives each peer all channels.
static uint64_t bytes_of(struct ncclComm* c, const Task* t) {
  const DeviceConfig* d = &config.device[c->device];
  uint64_t peers = d->nccl_p2p_channels, bytes = 0;
  uint32_t every = ((1u << c->ranks) - 1) & ~(1u << c->rank);
  uint32_t to_root = every & 1u << t->root;  // or to the peer
  bool root = c->rank == t->root;
  uint32_t sends = 0, receives = 0, connects = RING;
  switch (t->kind) {
    case SEND:
      sends = to_root, connects = 0;
      break;
    case RECEIVE:
      receives = to_root, connects = 0;
      break;
    case ALL_TO_ALL:
      sends = receives = every, connects = 0;
      break;
    case GATHER:
      sends = to_root, receives = root ? every : 0, connects = 0;
      break;
    case SCATTER:
      sends = root ? every : 0, receives = to_root, connects = 0;
      break;
    case ALL_REDUCE:
      if (nvls_channels(c) && t->count * nccl_type_bytes(t->type) >= NVLS_FROM)
        connects = NVLS;
      break;
    default:
      break;
  }
  connects &= ~c->connected;
  sends &= ~c->sends;
  receives &= ~c->receives;
  if (connects & RING)
    bytes += d->nccl_channels * (bytes_to_send(c) + bytes_to_receive(c));
  if (connects & NVLS)  // nvls.cc, ncclNvlsBufferSetup
    bytes += block(c, 2ull * nvls_channels(c) * NVLS_BUFFER * c->ranks);
  bytes += peers * __builtin_popcount(sends) * bytes_to_send(c);
  bytes += peers * __builtin_popcount(receives) * bytes_to_receive(c);
  c->connected |= connects;
  c->sends |= sends;
  c->receives |= receives;
  return bytes;
}

ncclResult_t comm_connect(struct ncclComm* c, const Batch* b) {
  if (!config.device[c->device].nccl_channels || c->ranks == 1) return ncclSuccess;
  ncclResult_t result = ncclSuccess;
  pthread_mutex_lock(&c->lock);
  if (!charge_stack(c->device, STACK)) result = refused(STACK);
  for (size_t i = 0; i < b->tasks && !result; i++) {
    uint64_t bytes = bytes_of(c, &b->task[i]);
    if (!take(c, bytes)) result = refused(bytes);
  }
  if (result && !c->error) {
    __atomic_store_n(&c->error, result, __ATOMIC_RELEASE);
    board_leave(c);  // peers see an error, too
  }
  pthread_mutex_unlock(&c->lock);
  return result;
}
