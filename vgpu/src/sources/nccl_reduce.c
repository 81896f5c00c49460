// Data types and reductions of NCCL.
#include <string.h>

#include "sources/communicator.h"

size_t nccl_type_bytes(int type) {
  static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return bytes[type];
}

static float from_bf16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

static uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (value != value) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float from_half(uint16_t bits) {
  uint32_t sign = (uint32_t)(bits & 0x8000) << 16;
  uint32_t exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
  float value;
  if (exponent == 0) {
    value = (float)fraction / (1 << 24);
    return sign ? -value : value;
  }
  uint32_t wide = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
  memcpy(&value, &wide, 4);
  return value;
}

static uint16_t to_half(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  uint32_t size = bits & 0x7fffffff;
  if (size > 0x7f800000) return sign | 0x7e00;
  if (size >= 0x477ff000) return sign | 0x7c00;  // rounds to infinity
  if (size < 0x38800000) {                       // subnormal: in units of 2^-24
    float units = (value < 0 ? -value : value) * (1 << 24);
    uint32_t whole = (uint32_t)units;
    float rest = units - (float)whole;
    return sign | (uint16_t)(whole + (rest > 0.5f || (rest == 0.5f && whole & 1)));
  }
  size -= 112u << 23;
  return sign | (uint16_t)((size + 0xfff + (size >> 13 & 1)) >> 13);
}

#define SAME(x) (x)
// Sums and products in `wide`, rounded once; order of ranks.
#define REDUCTION(name, type, wide, load, store)                              \
  static void name(char* const* in, int n, size_t count, int op, char* out) { \
    for (size_t i = 0; i < count; i++) {                                      \
      wide all = load(((const type*)in[0])[i]);                               \
      for (int r = 1; r < n; r++) {                                           \
        wide one = load(((const type*)in[r])[i]);                             \
        all = op == ncclProd  ? (wide)(all * one)                             \
              : op == ncclMax ? (one > all ? one : all)                       \
              : op == ncclMin ? (one < all ? one : all)                       \
                              : (wide)(all + one);                            \
      }                                                                       \
      ((type*)out)[i] = (type)store(op == ncclAvg ? all / n : all);           \
    }                                                                         \
  }

#pragma GCC diagnostic ignored "-Wsign-compare"
REDUCTION(reduce_int8, int8_t, int32_t, SAME, SAME)
REDUCTION(reduce_uint8, uint8_t, uint32_t, SAME, SAME)
REDUCTION(reduce_int32, int32_t, int64_t, SAME, SAME)
REDUCTION(reduce_uint32, uint32_t, uint64_t, SAME, SAME)
REDUCTION(reduce_int64, int64_t, int64_t, SAME, SAME)
REDUCTION(reduce_uint64, uint64_t, uint64_t, SAME, SAME)
REDUCTION(reduce_half, uint16_t, float, from_half, to_half)
REDUCTION(reduce_float, float, float, SAME, SAME)
REDUCTION(reduce_double, double, double, SAME, SAME)
REDUCTION(reduce_bf16, uint16_t, float, from_bf16, to_bf16)

Reduction* const nccl_reductions[ncclNumTypes] = {
    reduce_int8,   reduce_uint8, reduce_int32, reduce_uint32, reduce_int64,
    reduce_uint64, reduce_half,  reduce_float, reduce_double, reduce_bf16};
