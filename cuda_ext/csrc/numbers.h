// Number formats as integer arithmetic, the same on CPU and GPU. Loading is exact; storing rounds to nearest, ties to
// even, as torch does. Written without branches, so that compilers turn loops over them into vector code.
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define LA_INLINE __host__ __device__ __forceinline__ static
#else
#define LA_INLINE inline __attribute__((always_inline)) static
#endif

#if defined(__CUDACC__)
#define LA_SQRT sqrtf
#else
#define LA_SQRT __builtin_sqrtf
#endif

namespace la {

LA_INLINE uint32_t bits(float value) {
  uint32_t out;
  memcpy(&out, &value, 4);
  return out;
}

LA_INLINE float real(uint32_t value) {
  float out;
  memcpy(&out, &value, 4);
  return out;
}

constexpr uint32_t kSign = 0x80000000u, kInfinity = 0x7f800000u, kNaN = 0x7fc00000u;

LA_INLINE uint32_t magnitude(float value) { return bits(value) & ~kSign; }
LA_INLINE bool finite(float value) { return magnitude(value) < kInfinity; }

struct Fp32 {
  using Stored = float;
  LA_INLINE float load(float value) { return value; }
  LA_INLINE float store(float value) { return value; }
};

struct Bf16 {
  using Stored = uint16_t;
  LA_INLINE float load(uint16_t value) { return real((uint32_t)value << 16); }
  LA_INLINE uint16_t store(float value) {
    uint32_t b = bits(value);
    uint32_t rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
    return (uint16_t)((b & ~kSign) > kInfinity ? 0x7fc0u : rounded);
  }
};

struct Fp16 {
  using Stored = uint16_t;
  LA_INLINE float load(uint16_t value) {
    uint32_t h = value, rest = h & 0x7fffu, mantissa = h & 0x3ffu;
    uint32_t normal = (rest << 13) + (112u << 23);
    uint32_t special = kInfinity | (mantissa << 13);
    uint32_t small = bits((float)(int32_t)mantissa * 5.9604644775390625e-08f);  // subnormal: mantissa * 2^-24
    uint32_t out = rest >= 0x7c00u ? special : (rest < 0x400u ? small : normal);
    return real(out | ((h & 0x8000u) << 16));
  }
  LA_INLINE uint16_t store(float value) {
    uint32_t b = bits(value), sign = (b & kSign) >> 16;
    b &= ~kSign;
    uint32_t small = bits(real(b) + 0.5f) - (126u << 23);  // adding 0.5 shifts and rounds a subnormal into place
    uint32_t normal = (b - (112u << 23) + 0xfffu + ((b >> 13) & 1u)) >> 13;
    uint32_t out = b < (113u << 23) ? small : normal;
    out = b >= 0x477ff000u ? 0x7c00u : out;  // 65520 and above round to infinity
    out = b > kInfinity ? 0x7e00u : out;
    return (uint16_t)(out | sign);
  }
};

// float8_e4m3fn: no infinity; 448 is the largest value, and what would round beyond it becomes NaN.
struct Fp8 {
  using Stored = uint8_t;
  LA_INLINE float load(uint8_t value) {
    uint32_t h = value, rest = h & 0x7fu;
    uint32_t normal = (rest << 20) + (120u << 23);
    uint32_t small = bits((float)(int32_t)rest * 0.001953125f);  // subnormal: mantissa * 2^-9
    uint32_t out = rest == 0x7fu ? kNaN : (rest < 8u ? small : normal);
    return real(out | ((h & 0x80u) << 24));
  }
  LA_INLINE uint8_t store(float value) {
    uint32_t b = bits(value), sign = (b & kSign) >> 24;
    b &= ~kSign;
    uint32_t small = bits(real(b) + 16384.0f) - (141u << 23);
    uint32_t normal = (b - (120u << 23) + 0x7ffffu + ((b >> 20) & 1u)) >> 20;
    uint32_t out = b < (121u << 23) ? small : normal;
    out = b >= (1087u << 20) ? 0x7fu : out;
    return (uint8_t)(out | sign);
  }
};

}  // namespace la
