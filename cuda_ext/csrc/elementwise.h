// What happens to one element, shared by the CPU and the CUDA library. Every line is one single-rounding operation
// (the compilers are told not to contract them), so that both libraries and the reference in torch agree to the bit.
//
// A functor has `kArrays` arrays. Array 0 is stored in the format P (fp32, bf16, fp16), all others in fp32. The driver
// loads `r[k]` of the arrays in `kReads`, calls `run`, and stores those in `kWrites`. `s` holds the scalars; what `run`
// puts into `n[0 .. kNorms)` is squared and summed in double precision where the caller asked for norms.
#pragma once
#include "numbers.h"

namespace la {

template <class P>
LA_INLINE float rounded(float value) { return P::load(P::store(value)); }

// out = w v, snapshot = v, with v = x + rest.                        s: w           n: v
template <bool kSnapshot, bool kRest>
struct Pack {
  static constexpr int kArrays = 2 + kSnapshot + kRest, kNorms = 1, kLast = kArrays - 1;
  static constexpr unsigned kReads = 1u | (kRest ? 1u << kLast : 0u), kWrites = kSnapshot ? 6u : 2u;
  template <class P>
  LA_INLINE void run(float* r, const float* s, float* n) {
    float v = kRest ? r[0] + r[kLast] : r[0];
    if (kSnapshot) r[2] = v;
    r[1] = s[0] * v;
    n[0] = v;
  }
};

// v = (x + rest) + (target - base), x = cast(v), rest = v - x.                     n: target - base, v
template <bool kRest>
struct Move {
  static constexpr int kArrays = 3 + kRest, kNorms = 2;
  static constexpr unsigned kReads = kRest ? 15u : 7u, kWrites = 1u | (kRest ? 8u : 0u);
  template <class P>
  LA_INLINE void run(float* r, const float*, float* n) {
    float d = r[1] - r[2];
    float v = (kRest ? r[0] + r[3] : r[0]) + d;
    r[0] = v;
    if (kRest) r[3] = v - rounded<P>(v);
    n[0] = d;
    n[1] = v;
  }
};

// x = cast(target), rest = target - x.                                             n: target
template <bool kRest>
struct Copy {
  static constexpr int kArrays = 2 + kRest, kNorms = 1;
  static constexpr unsigned kReads = 2u, kWrites = 1u | (kRest ? 4u : 0u);
  template <class P>
  LA_INLINE void run(float* r, const float*, float* n) {
    float v = r[1];
    r[0] = v;
    if (kRest) r[2] = v - rounded<P>(v);
    n[0] = v;
  }
};

// sum = sum + w x.                                                   s: w          n: sum
struct Accumulate {
  static constexpr int kArrays = 2, kNorms = 1;
  static constexpr unsigned kReads = 3u, kWrites = 2u;
  template <class P>
  LA_INLINE void run(float* r, const float* s, float* n) {
    float term = s[0] * r[0];
    r[1] = r[1] + term;
    n[0] = r[1];
  }
};

// Momentum on an anchor: m = mu m + g, a = a - lr (g + mu m) with nesterov, else a - lr m.
LA_INLINE void momentum_step(float& a, float& m, float g, float lr, float mu, float nesterov) {
  float decayed = mu * m;
  m = decayed + g;
  float ahead = mu * m;
  ahead = g + ahead;
  float step = lr * (nesterov != 0.0f ? ahead : m);
  a = a - step;
}

// A momentum step on message buckets. arrays: received (g, becomes the new anchor), anchor, momentum, [sent (old anchor
// minus snapshot, becomes the snapshot)]                             s: lr, mu, nesterov         n: g
template <bool kSent>
struct OuterMerge {
  static constexpr int kArrays = 3 + kSent, kNorms = 1;
  static constexpr unsigned kReads = kSent ? 15u : 7u, kWrites = kReads;
  template <class P>
  LA_INLINE void run(float* r, const float* s, float* n) {
    n[0] = r[0];
    if (kSent) r[3] = r[1] - r[3];
    momentum_step(r[1], r[2], r[0], s[0], s[1], s[2]);
    r[0] = r[1];
  }
};

// A server's steps write what becomes of one bank of memory into another one, and with kReply the weights once more,
// into the memory of whoever pulls.

// L2's part of a gradient. Without decay nothing is added: no product with an infinite weight.
LA_INLINE float decayed_gradient(float g, float x, float decay) {
  float pull = decay * x;
  float sum = g + pull;
  return decay != 0.0f ? sum : g;
}

// arrays: gradient, params | new params, [reply]                     s: w, -decay                n: the new params
template <bool kReply>
struct ServerAdd {
  static constexpr int kArrays = 3 + kReply, kNorms = 1;
  static constexpr unsigned kReads = 3u, kWrites = kReply ? 12u : 4u;
  template <class P>
  LA_INLINE void run(float* r, const float* s, float* n) {
    float term = decayed_gradient(s[0] * r[0], r[1], s[1]);
    r[2] = r[1] + term;
    if (kReply) r[3] = r[2];
    n[0] = r[2];
  }
};

// arrays: gradient, params, momentum | new params, new momentum, [reply]
// s: lr, mu, nesterov, scale, decay                                  n: scale g
template <bool kReply>
struct ServerSgd {
  static constexpr int kArrays = 5 + kReply, kNorms = 1;
  static constexpr unsigned kReads = 7u, kWrites = kReply ? 56u : 24u;
  template <class P>
  LA_INLINE void run(float* r, const float* s, float* n) {
    float g = s[3] * r[0];
    r[3] = r[1];
    r[4] = r[2];
    momentum_step(r[3], r[4], decayed_gradient(g, r[1], s[4]), s[0], s[1], s[2]);
    if (kReply) r[5] = r[3];
    n[0] = g;
  }
};

// arrays: gradient, params, worker's momentum, sum of all momenta | the same three, new, look-ahead, [reply: look-ahead]
// s: lr, mu, lr * mu, scale                                          n: scale g
template <bool kReply>
struct ServerDana {
  static constexpr int kArrays = 8 + kReply, kNorms = 1;
  static constexpr unsigned kReads = 15u, kWrites = kReply ? 496u : 240u;
  template <class P>
  LA_INLINE void run(float* r, const float* s, float* n) {
    float g = s[3] * r[0];
    float decayed = s[1] * r[2];
    float m = decayed + g;
    float change = m - r[2];
    r[6] = r[3] + change;
    r[5] = m;
    float step = s[0] * m;
    r[4] = r[1] - step;
    float ahead = s[2] * r[6];
    r[7] = r[4] - ahead;
    if (kReply) r[8] = r[7];
    n[0] = g;
  }
};

// arrays: gradient, params, first moment, second moment | the same three, new, [reply]
// s: step size, beta1, 1 - beta1, beta2, 1 - beta2, root of the second bias correction, eps, scale, decay, what is kept
// of the params                                                      n: scale g
template <bool kReply>
struct ServerAdam {
  static constexpr int kArrays = 7 + kReply, kNorms = 1;
  static constexpr unsigned kReads = 15u, kWrites = kReply ? 240u : 112u;
  template <class P>
  LA_INLINE void run(float* r, const float* s, float* n) {
    float given = s[7] * r[0];
    float g = decayed_gradient(given, r[1], s[8]);
    float first = s[2] * g;
    float square = g * g;
    float second = s[4] * square;
    float kept = s[1] * r[2];
    r[5] = kept + first;
    kept = s[3] * r[3];
    r[6] = kept + second;
    float root = LA_SQRT(r[6]) / s[5];
    root = root + s[6];
    float step = r[5] / root;
    step = s[0] * step;
    float x = s[9] * r[1];
    r[4] = x - step;
    if (kReply) r[7] = r[4];
    n[0] = given;
  }
};

constexpr int kMaxArrays = 9, kMaxNorms = 2, kMaxScalars = 10;

}  // namespace la

// Name, functor. The names are part of the ABI: callers look them up with la_find.
#define LA_ELEMENTWISE(X)                         \
  X("pack", (Pack<false, false>))                 \
  X("pack_rest", (Pack<false, true>))             \
  X("pack_snapshot", (Pack<true, false>))         \
  X("pack_snapshot_rest", (Pack<true, true>))     \
  X("move", (Move<false>))                        \
  X("move_rest", (Move<true>))                    \
  X("copy", (Copy<false>))                        \
  X("copy_rest", (Copy<true>))                    \
  X("accumulate", (Accumulate))                   \
  X("outer_merge", (OuterMerge<false>))           \
  X("outer_merge_sent", (OuterMerge<true>))       \
  X("server_add", (ServerAdd<false>))             \
  X("server_add_reply", (ServerAdd<true>))        \
  X("server_sgd", (ServerSgd<false>))             \
  X("server_sgd_reply", (ServerSgd<true>))        \
  X("server_dana", (ServerDana<false>))           \
  X("server_dana_reply", (ServerDana<true>))      \
  X("server_adam", (ServerAdam<false>))           \
  X("server_adam_reply", (ServerAdam<true>))
