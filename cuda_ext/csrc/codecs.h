// Compressed formats, in blocks of 256 elements, shared by the CPU and the CUDA library.
//
// Encoding takes v = source + residual and leaves residual = v - decoded, so nothing is lost: decoded + residual = v,
// exactly but for 2 bits, where a value above twice the threshold is rounded once. A value that is no finite number is sent as NaN (with a scaled format the whole block is), and its residual
// starts from zero: the receivers see it, and the next message is clean.
#pragma once
#include "numbers.h"

namespace la {

constexpr int kBlock = 256;
enum Format { kInt8 = 0, kFloat8 = 1, kBFloat16 = 2, kTwoBit = 3 };

// round(absmax / largest): zero for blocks of zeros, NaN for blocks with anything that is not finite
LA_INLINE float block_scale(uint32_t largest_magnitude, float largest_code) {
  return largest_magnitude >= kInfinity ? real(kNaN) : real(largest_magnitude) / largest_code;
}

struct Int8Codec {
  using Code = int8_t;
  static constexpr bool kScaled = true;
  static constexpr float kLargest = 127.0f;
  LA_INLINE float decode(int8_t code, float scale) { return (float)(int32_t)code * scale; }
  static constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even
  LA_INLINE int8_t encode(float v, float scale) {
    float q = v / scale;
    q = q < 127.0f ? q : 127.0f;
    q = q > -127.0f ? q : -127.0f;
    float shifted = q + kShift;  // whose lowest byte is the integer's
    return (int8_t)(scale > 0.0f ? bits(shifted) : 0u);
  }
};

struct Float8Codec {
  using Code = uint8_t;
  static constexpr bool kScaled = true;
  static constexpr float kLargest = 448.0f;
  LA_INLINE float decode(uint8_t code, float scale) { return Fp8::load(code) * scale; }
  LA_INLINE uint8_t encode(float v, float scale) {
    float q = v / scale;
    q = q < 448.0f ? q : 448.0f;
    q = q > -448.0f ? q : -448.0f;
    uint8_t code = Fp8::store(q);
    return (uint8_t)(scale > 0.0f ? code : 0);
  }
};

struct BFloat16Codec {
  using Code = uint16_t;
  static constexpr bool kScaled = false;
  static constexpr float kLargest = 0.0f;
  LA_INLINE float decode(uint16_t code, float) { return Bf16::load(code); }
  LA_INLINE uint16_t encode(float v, float) {
    uint16_t code = Bf16::store(v);  // what rounds up to infinity is cut off instead: the residual stays finite
    uint16_t cut = (uint16_t)(bits(v) >> 16);
    code = (code & 0x7fffu) == 0x7f80u ? cut : code;
    return finite(v) ? code : (uint16_t)0x7fc0u;
  }
};

template <class C>
LA_INLINE float residual_of(float v, typename C::Code code, float scale) {
  float decoded = C::decode(code, scale);
  float rest = v - decoded;
  return finite(rest) ? rest : 0.0f;
}

// 2 bits: 0 is zero, 1 is +threshold, 2 is -threshold, 3 is NaN. Element 4 j + i lies in bits 2 i of byte j.
LA_INLINE uint32_t two_bit_encode(float v, float threshold) {
  uint32_t code = v >= threshold ? 1u : (v <= -threshold ? 2u : 0u);
  return finite(v) ? code : 3u;
}

LA_INLINE float two_bit_decode(uint32_t code, float threshold) {
  float up = code == 1u ? threshold : (code == 2u ? -threshold : 0.0f);
  return code == 3u ? real(kNaN) : up;
}

LA_INLINE float two_bit_residual(float v, uint32_t code, float threshold) {
  float rest = v - two_bit_decode(code, threshold);
  return finite(rest) ? rest : 0.0f;
}

}  // namespace la
