// The CPU kernels. The build compiles this file once per instruction-set level with LA_LEVEL set to its name; all else
// has internal linkage, so that the linker cannot mix the levels.
#include "cpu_kernels.h"

#include <stdlib.h>
#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif
#include <unistd.h>

#include "codecs.h"
#include "elementwise.h"

namespace {
using namespace la;

constexpr int kPiece = 2048;  // elements at a time that stay in L1
// With norms or streamed outputs fewer: while one strip is summed or flushed, the processor already waits for the next.
constexpr int kNormStrip = 64, kStreamedStrip = 128;
constexpr int kAhead = 256;  // elements from those that are summed to those that are asked of the memory

template <class F>
void parallel(int64_t count, int threads, const F& run) {
#if defined(_OPENMP)
  if (threads > 1 && count > 1) {
#pragma omp parallel num_threads(threads)
    {
      int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
      for (int64_t i = count * me / team; i < count * (me + 1) / team; i++) run(i);
    }
    return;
  }
#endif
  for (int64_t i = 0; i < count; i++) run(i);
}

// Buffers beyond the last cache are not read again soon: writing around the caches saves reading them first.
int64_t stream_from_bytes() {
  static const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
  return cache > 0 ? cache : 32 << 20;
}

void copy_streaming(void* to, const void* from, int64_t bytes) {
#if defined(__SSE2__)
  char* out = (char*)to;
  const char* in = (const char*)from;
  int64_t head = (int64_t)((16 - ((uintptr_t)out & 15)) & 15);
  head = head < bytes ? head : bytes;
  memcpy(out, in, (size_t)head);
  int64_t i = head;
  for (; i + 64 <= bytes; i += 64)
    for (int j = 0; j < 64; j += 16)
      _mm_stream_si128((__m128i*)(out + i + j), _mm_loadu_si128((const __m128i*)(in + i + j)));
  memcpy(out + i, in + i, (size_t)(bytes - i));
#else
  memcpy(to, from, (size_t)bytes);
#endif
}

void finish_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Asks for memory that will be read soon; addresses beyond an array do no harm.
inline void prefetch(const void* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)from + i);
}

typedef float Floats __attribute__((vector_size(16)));
typedef double Doubles __attribute__((vector_size(32)));

inline __attribute__((always_inline)) Doubles doubles_at(const float* at) {
#if defined(__AVX__)
  return (Doubles)_mm256_cvtps_pd(_mm_loadu_ps(at));  // GCC 12 makes three instructions of the line below
#else
  Floats out;
  memcpy(&out, at, sizeof out);
  return __builtin_convertvector(out, Doubles);
#endif
}

// A sum of (a - b)^2, or of a^2 without b, in double precision: element i goes to lane i % 16 at every level.
struct SquareSum {
  Doubles lanes[4] = {};

  inline __attribute__((always_inline)) void add16(const float* a, const float* b) {
    for (int l = 0; l < 4; l++) {
      Doubles d = doubles_at(a + 4 * l);
      if (b) d -= doubles_at(b + 4 * l);
#if defined(__FMA__)
      else { lanes[l] = _mm256_fmadd_pd(d, d, lanes[l]); continue; }  // an fp32 square is exact: this rounds the same
#endif
      lanes[l] += d * d;
    }
  }

  inline __attribute__((always_inline)) void add(const float* a, const float* b, int n) {
    int whole = n / 16 * 16;
    for (int i = 0; i < whole; i += 16) add16(a + i, b ? b + i : nullptr);
    if (whole == n) return;
    float rest[2][16] = {};
    memcpy(rest[0], a + whole, 4 * (size_t)(n - whole));
    if (b) memcpy(rest[1], b + whole, 4 * (size_t)(n - whole));
    add16(rest[0], rest[1]);
  }

  double total() const {
    double total = 0.0;
    for (int l = 0; l < 4; l++)
      for (int j = 0; j < 4; j++) total += lanes[l][j];
    return total;
  }
};

double sum_of_squares(const float* a, const float* b, int n) {
  SquareSum sum;
  b ? sum.add(a, b, n) : sum.add(a, nullptr, n);
  return sum.total();
}

// n elements, with norms at most a strip, whose squares are added to the sums.
template <class Op, class P, bool kNorm>
inline __attribute__((always_inline)) void map(char* const* from, char* const* to, int n, const float* scalars,
                                               SquareSum* sums) {
  alignas(64) float terms[kMaxNorms][kNorm ? kStreamedStrip : 1];
  float s[kMaxScalars];
  for (int k = 0; k < kMaxScalars; k++) s[k] = scalars[k];
  const typename P::Stored* x = (const typename P::Stored*)from[0];
  typename P::Stored* y = (typename P::Stored*)to[0];
#define LA_ARRAY(k)                          \
  const float* in##k = (float*)from[k];      \
  float* out##k = (float*)to[k];             \
  (void)in##k, (void)out##k;
  LA_ARRAY(1) LA_ARRAY(2) LA_ARRAY(3) LA_ARRAY(4) LA_ARRAY(5) LA_ARRAY(6) LA_ARRAY(7) LA_ARRAY(8)
#undef LA_ARRAY
  (void)terms, (void)y, (void)x;
#define LA_READS(k) (Op::kArrays > k && ((Op::kReads >> k) & 1u))
#define LA_WRITES(k) (Op::kArrays > k && ((Op::kWrites >> k) & 1u))
#pragma GCC ivdep
  for (int i = 0; i < n; i++) {
    float r[kMaxArrays] = {}, m[kMaxNorms];
    if (LA_READS(0)) r[0] = P::load(x[i]);
#define LA_LOAD(k) if (LA_READS(k)) r[k] = in##k[i];
    LA_LOAD(1) LA_LOAD(2) LA_LOAD(3) LA_LOAD(4) LA_LOAD(5) LA_LOAD(6) LA_LOAD(7) LA_LOAD(8)
#undef LA_LOAD
    Op::template run<P>(r, s, m);
    if (LA_WRITES(0)) y[i] = P::store(r[0]);
#define LA_STORE(k) if (LA_WRITES(k)) out##k[i] = r[k];
    LA_STORE(1) LA_STORE(2) LA_STORE(3) LA_STORE(4) LA_STORE(5) LA_STORE(6) LA_STORE(7) LA_STORE(8)
#undef LA_STORE
    for (int j = 0; kNorm && j < Op::kNorms; j++) terms[j][i] = m[j];
  }
  for (int j = 0; kNorm && j < Op::kNorms; j++) sums[j].add(terms[j], nullptr, n);
}

// One chunk, strip by strip. Outputs that are only written go through a scratch buffer if they are streamed.
template <class Op, class P, bool kNorm>
void chunk(void* const* arrays, int64_t start, int64_t n, const float* scalars, double* partial, bool stream) {
  constexpr unsigned kOnlyWritten = Op::kWrites & ~Op::kReads;
  constexpr int kLength = kOnlyWritten ? kStreamedStrip : kNorm ? kNormStrip : kPiece;
  constexpr int kFirst = sizeof(typename P::Stored);
  alignas(64) float scratch[kOnlyWritten ? __builtin_popcount(kOnlyWritten) : 1][kLength];
  SquareSum sums[kMaxNorms];
  for (int64_t at = 0; at < n; at += kLength) {
    int m = (int)(n - at < kLength ? n - at : kLength);
    char *from[kMaxArrays] = {}, *to[kMaxArrays] = {};
    for (int k = 0, used = 0; k < Op::kArrays; k++) {
      int width = k ? 4 : kFirst;
      from[k] = to[k] = (char*)arrays[k] + (start + at) * width;
      if (kNorm && !kOnlyWritten && ((Op::kReads >> k) & 1u)) prefetch(from[k] + kAhead * width, kLength * width);
      if (stream && ((kOnlyWritten >> k) & 1u)) to[k] = (char*)scratch[used++];
    }
    // the constant is worth 5% with norms
    if (kNorm && m == kLength) map<Op, P, kNorm>(from, to, kLength, scalars, sums);
    else map<Op, P, kNorm>(from, to, m, scalars, sums);
    for (int k = 0; k < Op::kArrays; k++)
      if (to[k] != from[k]) copy_streaming(from[k], to[k], (int64_t)m * (k ? 4 : kFirst));
  }
  if (stream && kOnlyWritten) finish_streaming();
  for (int j = 0; kNorm && j < kMaxNorms; j++) partial[j] = sums[j].total();
}

using Chunk = void (*)(void* const*, int64_t, int64_t, const float*, double*, bool);
struct Entry {
  Chunk run[2][3];  // without and with norms, per format
  int arrays;
};

template <class Op>
constexpr Entry entry() {
  return {{{chunk<Op, Fp32, false>, chunk<Op, Bf16, false>, chunk<Op, Fp16, false>},
           {chunk<Op, Fp32, true>, chunk<Op, Bf16, true>, chunk<Op, Fp16, true>}}, Op::kArrays};
}

#define LA_STRIP(...) __VA_ARGS__
#define LA_ENTRY(name, functor) entry<LA_STRIP functor>(),
constexpr Entry kTable[] = {LA_ELEMENTWISE(LA_ENTRY)};
constexpr int kCount = sizeof kTable / sizeof kTable[0];

int64_t chunks_of(int64_t n) { return (n + LA_CHUNK - 1) / LA_CHUNK; }

// Partial sums are added in the order of the chunks, whoever computed them.
void add_in_order(const double* partials, int64_t count, double* norms) {
  for (int j = 0; j < kMaxNorms; j++) norms[j] = 0.0;
  for (int64_t c = 0; c < count; c++)
    for (int j = 0; j < kMaxNorms; j++) norms[j] += partials[c * kMaxNorms + j];
}

int flat(int op, int format, void* const* arrays, int64_t n, int64_t whole, const float* scalars, double* norms,
         int threads) {
  if (op < 0 || op >= kCount || format < 0 || format > 2 || n < 0) return LA_BAD_ARGUMENT;
  int64_t count = chunks_of(n);
  double* partials = nullptr;
  if (norms && !(partials = (double*)malloc(sizeof(double) * kMaxNorms * (size_t)(count + 1)))) return LA_NO_MEMORY;
  Chunk run = kTable[op].run[norms != nullptr][format];
  bool stream = 4 * (whole > n ? whole : n) * kTable[op].arrays > stream_from_bytes();
  parallel(count, threads, [&](int64_t c) {
    int64_t start = c * LA_CHUNK, left = n - start;
    run(arrays, start, left < LA_CHUNK ? left : LA_CHUNK, scalars, norms ? partials + c * kMaxNorms : nullptr, stream);
  });
  if (norms) add_in_order(partials, count, norms);
  free(partials);
  return LA_OK;
}

int list(const la_segment* segments, int64_t count, float* const* buckets, int num_buckets, const float* scalars,
         double* norms, int threads) {
  int64_t total = 0, numel = 0;
  for (int64_t i = 0; i < count; i++) {
    const la_segment& s = segments[i];
    if (s.op < 0 || s.op >= kCount || s.format < 0 || s.format > 2 || s.numel < 0 || s.offset < 0 ||
        kTable[s.op].arrays != 1 + num_buckets + (s.rest != nullptr))
      return LA_BAD_ARGUMENT;
    total += chunks_of(s.numel);
    numel += s.numel;
  }
  int64_t* ends = (int64_t*)malloc(sizeof(int64_t) * (size_t)(count + 1));
  double* partials = norms ? (double*)malloc(sizeof(double) * kMaxNorms * (size_t)(total + 1)) : nullptr;
  if (!ends || (norms && !partials)) {
    free(ends), free(partials);
    return LA_NO_MEMORY;
  }
  for (int64_t i = 0, end = 0; i < count; i++) ends[i] = end += chunks_of(segments[i].numel);
  bool stream = 4 * numel * (1 + num_buckets) > stream_from_bytes();
  parallel(total, threads, [&](int64_t c) {
    int64_t low = 0, high = count - 1;  // the first segment that ends after chunk c
    while (low < high) {
      int64_t middle = (low + high) / 2;
      if (ends[middle] > c) high = middle; else low = middle + 1;
    }
    const la_segment& s = segments[low];
    void* arrays[kMaxArrays] = {s.x};
    for (int b = 0; b < num_buckets; b++) arrays[1 + b] = buckets[b] + s.offset;
    if (s.rest) arrays[1 + num_buckets] = s.rest;
    int64_t start = (c - (ends[low] - chunks_of(s.numel))) * LA_CHUNK, left = s.numel - start;
    kTable[s.op].run[norms != nullptr][s.format](arrays, start, left < LA_CHUNK ? left : LA_CHUNK, scalars,
                                                 norms ? partials + c * kMaxNorms : nullptr, stream);
  });
  if (norms) add_in_order(partials, total, norms);
  free(ends), free(partials);
  return LA_OK;
}

template <class P>
const float* as_floats(const void* a, int64_t at, int n, float* scratch) {
  const typename P::Stored* from = (const typename P::Stored*)a + at;
  for (int i = 0; i < n; i++) scratch[i] = P::load(from[i]);
  return scratch;
}

const float* as_floats(int format, const void* a, int64_t at, int n, float* scratch) {
  if (!a) return nullptr;
  if (format == LA_FP32) return (const float*)a + at;
  return format == LA_BF16 ? as_floats<Bf16>(a, at, n, scratch) : as_floats<Fp16>(a, at, n, scratch);
}

int square(int format_a, const void* a, int format_b, const void* b, int64_t n, double* out, int threads) {
  if (format_a < 0 || format_a > 2 || format_b < 0 || format_b > 2 || n < 0) return LA_BAD_ARGUMENT;
  int64_t count = chunks_of(n);
  double* partials = (double*)malloc(sizeof(double) * (size_t)(count + 1));
  if (!partials) return LA_NO_MEMORY;
  parallel(count, threads, [&](int64_t c) {
    alignas(64) float scratch[2][kPiece];
    int64_t end = (c + 1) * LA_CHUNK < n ? (c + 1) * LA_CHUNK : n;
    double sum = 0.0;
    for (int64_t at = c * LA_CHUNK; at < end; at += kPiece) {
      int m = (int)(end - at < kPiece ? end - at : kPiece);
      sum += sum_of_squares(as_floats(format_a, a, at, m, scratch[0]), as_floats(format_b, b, at, m, scratch[1]), m);
    }
    partials[c] = sum;
  });
  *out = 0.0;
  for (int64_t c = 0; c < count; c++) *out += partials[c];
  free(partials);
  return LA_OK;
}

// v = x + v, and the largest magnitude in it
inline __attribute__((always_inline)) uint32_t add_residual(float* v, const float* x, int n) {
  int32_t largest = 0;
#pragma GCC ivdep
  for (int i = 0; i < n; i++) {
    float sum = x[i] + v[i];
    int32_t mine = (int32_t)magnitude(sum);
    v[i] = sum;
    largest = mine > largest ? mine : largest;
  }
  return (uint32_t)largest;
}

// v becomes the residual.
template <class C>
inline __attribute__((always_inline)) void encode_block(float* v, typename C::Code* codes, float* scale, uint32_t largest,
                                                        int n) {
  float s = C::kScaled ? block_scale(largest, C::kLargest) : 0.0f;
  if (C::kScaled) *scale = s;
#pragma GCC ivdep
  for (int i = 0; i < n; i++) {
    typename C::Code code = C::encode(v[i], s);
    codes[i] = code;
    v[i] = residual_of<C>(v[i], code, s);
  }
}

// The same without the cases that a block of finite numbers, not all zero, cannot have.
template <>
inline __attribute__((always_inline)) void encode_block<Int8Codec>(float* v, int8_t* codes, float* scale, uint32_t largest,
                                                                   int n) {
  float s = *scale = block_scale(largest, Int8Codec::kLargest);
  if (s > 1e-30f) {  // the quotient cannot round beyond 127
#pragma GCC ivdep
    for (int i = 0; i < n; i++) {
      float shifted = v[i] / s + Int8Codec::kShift;
      codes[i] = (int8_t)bits(shifted);
      float decoded = (shifted - Int8Codec::kShift) * s;
      v[i] = v[i] - decoded;
    }
  } else {
    for (int i = 0; i < n; i++) {
      int8_t code = Int8Codec::encode(v[i], s);
      codes[i] = code;
      v[i] = residual_of<Int8Codec>(v[i], code, s);
    }
  }
}

inline void encode_two_bit(float* v, uint8_t* codes, float threshold, int n) {
  alignas(64) uint8_t each[kBlock];
#pragma GCC ivdep
  for (int i = 0; i < n; i++) {
    uint32_t code = two_bit_encode(v[i], threshold);
    each[i] = (uint8_t)code;
    v[i] = two_bit_residual(v[i], code, threshold);
  }
  for (int i = n; i < (n + 3) / 4 * 4; i++) each[i] = 0;
  for (int j = 0; j < (n + 3) / 4; j++)
    codes[j] = (uint8_t)(each[4 * j] | each[4 * j + 1] << 2 | each[4 * j + 2] << 4 | each[4 * j + 3] << 6);
}

template <class C>
void encode_blocks(void* codes, float* scales, const float* source, float* residual, int64_t start, int64_t end,
                   float threshold, bool two_bit) {
  for (int64_t at = start; at < end; at += kBlock) {
    int m = (int)(end - at < kBlock ? end - at : kBlock);
    float* v = residual + at;
    const float* x = source + at;
    prefetch(v + 2 * kBlock, 4 * kBlock);
    prefetch(x + 2 * kBlock, 4 * kBlock);
    uint32_t largest = m == kBlock ? add_residual(v, x, kBlock) : add_residual(v, x, m);
    if (two_bit) encode_two_bit(v, (uint8_t*)codes + at / 4, threshold, m);
    else if (m == kBlock) encode_block<C>(v, (typename C::Code*)codes + at, scales + at / kBlock, largest, kBlock);
    else encode_block<C>(v, (typename C::Code*)codes + at, scales + at / kBlock, largest, m);
  }
}

int quantize(int format, void* codes, float* scales, const float* source, float* residual, int64_t n, float threshold,
             int threads) {
  if (format < 0 || format > kTwoBit || n < 0) return LA_BAD_ARGUMENT;
  parallel(chunks_of(n), threads, [&](int64_t c) {
    int64_t start = c * LA_CHUNK, end = start + LA_CHUNK < n ? start + LA_CHUNK : n;
    if (format == kInt8) encode_blocks<Int8Codec>(codes, scales, source, residual, start, end, 0.0f, false);
    else if (format == kFloat8) encode_blocks<Float8Codec>(codes, scales, source, residual, start, end, 0.0f, false);
    else if (format == kBFloat16) encode_blocks<BFloat16Codec>(codes, nullptr, source, residual, start, end, 0.0f, false);
    else encode_blocks<Int8Codec>(codes, nullptr, source, residual, start, end, threshold, true);
  });
  return LA_OK;
}

// decoded = element `at ..` of one peer
template <class C>
inline __attribute__((always_inline)) void decode_block(const void* codes, float scale, int64_t at, float* decoded, int m) {
  const typename C::Code* from = (const typename C::Code*)codes + at;
  for (int i = 0; i < m; i++) decoded[i] = C::decode(from[i], scale);
}

inline void decode_two_bit(const void* codes, float threshold, int64_t at, float* decoded, int m) {
  const uint8_t* from = (const uint8_t*)codes + at / 4;
  alignas(64) uint8_t each[kBlock];
  for (int j = 0; j < (m + 3) / 4; j++)
    for (int i = 0; i < 4; i++) each[4 * j + i] = (uint8_t)((from[j] >> (2 * i)) & 3u);
#pragma GCC ivdep
  for (int i = 0; i < m; i++) decoded[i] = two_bit_decode(each[i], threshold);
}

struct Average {
  const char* codes;
  const float *scales, *weights;
  int64_t peers, n;
  float threshold;

  template <class C>
  void peer(int64_t k, int64_t at, float* decoded, int m) const {
    const void* mine = codes + k * n * (int64_t)sizeof(typename C::Code);
    float scale = C::kScaled ? scales[k * ((n + kBlock - 1) / kBlock) + at / kBlock] : 0.0f;
    if (m == kBlock) decode_block<C>(mine, scale, at, decoded, kBlock);
    else decode_block<C>(mine, scale, at, decoded, m);
  }

  void decode(int format, int64_t k, int64_t at, float* decoded, int m) const {
    if (format == kInt8) peer<Int8Codec>(k, at, decoded, m);
    else if (format == kFloat8) peer<Float8Codec>(k, at, decoded, m);
    else if (format == kBFloat16) peer<BFloat16Codec>(k, at, decoded, m);
    else decode_two_bit(codes + k * ((n + 3) / 4), threshold, at, decoded, m);
  }

  // sum over the peers of w * decoded, in their order
  void block(int format, int64_t at, float* sum, int m) const {
    alignas(64) float decoded[kBlock];
    for (int64_t k = 0; k < peers; k++) {
      decode(format, k, at, decoded, m);
      float w = weights[k];
      if (k == 0) {
        for (int i = 0; i < m; i++) sum[i] = w * decoded[i];
      } else {
        for (int i = 0; i < m; i++) {
          float term = w * decoded[i];
          sum[i] = sum[i] + term;
        }
      }
    }
  }
};

int average(int format, const void* codes, const float* scales, const float* weights, int64_t peers, int64_t n,
            float threshold, float* out, void* out_codes, float* out_scales, float* residual, int threads) {
  bool again = out_codes != nullptr;
  if (format < 0 || format > kTwoBit || peers < 1 || n < 0) return LA_BAD_ARGUMENT;
  Average a = {(const char*)codes, scales, weights, peers, n, threshold};
  bool stream = !again && 4 * n > stream_from_bytes();
  parallel(chunks_of(n), threads, [&](int64_t c) {
    alignas(64) float sum[kBlock];
    int64_t start = c * LA_CHUNK, end = start + LA_CHUNK < n ? start + LA_CHUNK : n;
    for (int64_t at = start; at < end; at += kBlock) {
      int m = (int)(end - at < kBlock ? end - at : kBlock);
      a.block(format, at, sum, m);
      if (again) {
        if (format == kInt8) encode_blocks<Int8Codec>((int8_t*)out_codes + at, out_scales + at / kBlock, sum, residual + at, 0, m, 0.0f, false);
        else if (format == kFloat8) encode_blocks<Float8Codec>((uint8_t*)out_codes + at, out_scales + at / kBlock, sum, residual + at, 0, m, 0.0f, false);
        else if (format == kBFloat16) encode_blocks<BFloat16Codec>((uint16_t*)out_codes + at, nullptr, sum, residual + at, 0, m, 0.0f, false);
        else encode_blocks<Int8Codec>((uint8_t*)out_codes + at / 4, nullptr, sum, residual + at, 0, m, threshold, true);
      } else {
        if (stream) copy_streaming(out + at, sum, 4 * (int64_t)m);
        else memcpy(out + at, sum, 4 * (size_t)m);
      }
    }
    if (stream) finish_streaming();
  });
  return LA_OK;
}

}  // namespace

#define LA_JOIN2(a, b) a##b
#define LA_JOIN(a, b) LA_JOIN2(a, b)
extern "C" const la_cpu_kernels LA_JOIN(la_cpu_kernels_, LA_LEVEL) = {flat, list, square, quantize, average};
