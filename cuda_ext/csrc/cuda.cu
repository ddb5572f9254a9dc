// The CUDA library: the same functors as on the CPU. A block takes one chunk of 65,536 elements, in loads and stores of 16
// bytes where all of its arrays are aligned. Norms are summed per chunk by a tree, then over the chunks by a second
// kernel, always in the same order: no atomics. Without nvcc, this file is C++ for the emulator (../emulator).
#include "abi.h"
#if defined(LA_EMULATOR)
#include "emulator.h"
#else
#include <cuda_runtime.h>
#define LA_LAUNCH(kernel, blocks, threads, stream, ...) \
  kernel<<<(unsigned)(blocks), threads, 0, (cudaStream_t)(stream)>>>(__VA_ARGS__)
#endif

#include "codecs.h"
#include "elementwise.h"

namespace {
using namespace la;

constexpr int kThreads = 256;

struct Arrays {
  void* p[kMaxArrays];
};
struct Scalars {
  float v[kMaxScalars];
};

// 16 bytes, so that the compiler makes one load or store of them.
template <class T>
struct alignas(16) Vector {
  T v[16 / sizeof(T)];
};

template <class T>
__device__ __forceinline__ Vector<T> load_vector(const T* from) {
  Vector<T> out;
  uint4 raw = *reinterpret_cast<const uint4*>(from);
  memcpy(&out, &raw, 16);
  return out;
}

template <class T>
__device__ __forceinline__ void store_vector(T* to, const Vector<T>& value) {
  uint4 raw;
  memcpy(&raw, &value, 16);
  *reinterpret_cast<uint4*>(to) = raw;
}

// V elements in the format P between memory and registers.
template <class P, int V>
__device__ __forceinline__ void load_many(const typename P::Stored* from, float* to) {
  constexpr int kEach = 16 / sizeof(typename P::Stored);
#pragma unroll
  for (int i = 0; i < V; i += kEach) {
    Vector<typename P::Stored> raw = load_vector(from + i);
#pragma unroll
    for (int j = 0; j < kEach; j++) to[i + j] = P::load(raw.v[j]);
  }
}

template <class P, int V>
__device__ __forceinline__ void store_many(typename P::Stored* to, const float* from) {
  constexpr int kEach = 16 / sizeof(typename P::Stored);
#pragma unroll
  for (int i = 0; i < V; i += kEach) {
    Vector<typename P::Stored> raw;
#pragma unroll
    for (int j = 0; j < kEach; j++) raw.v[j] = P::store(from[i + j]);
    store_vector(to + i, raw);
  }
}

// The sum of `value` over the block, in a fixed order; every thread calls it, thread 0 gets the sum.
__device__ __forceinline__ double block_sum(double value) {
  __shared__ double sums[kThreads];
  __syncthreads();
  sums[threadIdx.x] = value;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if ((int)threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    __syncthreads();
  }
  return sums[0];
}

template <class Op, class P, bool kNorms>
__device__ __forceinline__ void chunk(const Arrays& arrays, int64_t start, int n, const Scalars& s, double* partial) {
  using Stored = typename P::Stored;
  constexpr int V = 16 / sizeof(Stored), K = Op::kArrays;
  Stored* x = (Stored*)arrays.p[0] + start;
  float* a[kMaxArrays];
  bool aligned = ((uintptr_t)x & 15) == 0;
#pragma unroll
  for (int k = 1; k < K; k++) {
    a[k] = (float*)arrays.p[k] + start;
    aligned = aligned && ((uintptr_t)a[k] & 15) == 0;
  }
  double sums[kMaxNorms] = {0.0, 0.0};
  int whole = aligned ? n / V * V : 0;
  for (int i = (int)threadIdx.x * V; i < whole; i += kThreads * V) {
    float r[K][V];
#pragma unroll
    for (int k = 0; k < K; k++)
      if ((Op::kReads >> k) & 1u) {
        if (k == 0) load_many<P, V>(x + i, r[0]);
        else load_many<Fp32, V>(a[k] + i, r[k]);
      }
#pragma unroll
    for (int j = 0; j < V; j++) {
      float one[kMaxArrays], norm[kMaxNorms];
#pragma unroll
      for (int k = 0; k < K; k++) one[k] = (Op::kReads >> k) & 1u ? r[k][j] : 0.0f;
      Op::template run<P>(one, s.v, norm);
#pragma unroll
      for (int k = 0; k < K; k++)
        if ((Op::kWrites >> k) & 1u) r[k][j] = one[k];
      if (kNorms)
        for (int m = 0; m < Op::kNorms; m++) sums[m] += (double)norm[m] * (double)norm[m];
    }
#pragma unroll
    for (int k = 0; k < K; k++)
      if ((Op::kWrites >> k) & 1u) {
        if (k == 0) store_many<P, V>(x + i, r[0]);
        else store_many<Fp32, V>(a[k] + i, r[k]);
      }
  }
  for (int i = whole + (int)threadIdx.x; i < n; i += kThreads) {
    float one[kMaxArrays], norm[kMaxNorms];
#pragma unroll
    for (int k = 0; k < K; k++)
      if ((Op::kReads >> k) & 1u) one[k] = k == 0 ? P::load(x[i]) : a[k][i];
    Op::template run<P>(one, s.v, norm);
#pragma unroll
    for (int k = 0; k < K; k++)
      if ((Op::kWrites >> k) & 1u) {
        if (k == 0) x[i] = P::store(one[0]);
        else a[k][i] = one[k];
      }
    if (kNorms)
      for (int m = 0; m < Op::kNorms; m++) sums[m] += (double)norm[m] * (double)norm[m];
  }
  if (kNorms)
    for (int m = 0; m < kMaxNorms; m++) {
      double sum = m < Op::kNorms ? block_sum(sums[m]) : 0.0;
      if (threadIdx.x == 0) partial[m] = sum;
    }
}

__device__ __forceinline__ int length_of_chunk(int64_t start, int64_t n) {
  return (int)(n - start < LA_CHUNK ? n - start : LA_CHUNK);
}

template <class Op, class P, bool kNorms>
__global__ void __launch_bounds__(kThreads, 2) flat_kernel(Arrays arrays, int64_t n, Scalars s, double* partials) {
  int64_t start = (int64_t)blockIdx.x * LA_CHUNK;
  chunk<Op, P, kNorms>(arrays, start, length_of_chunk(start, n), s, kNorms ? partials + (int64_t)blockIdx.x * kMaxNorms : nullptr);
}

// `chunks` names, for every block, its segment and which chunk of that segment.
template <class Op, class P, bool kNorms>
__global__ void __launch_bounds__(kThreads, 2)
    list_kernel(const la_segment* segments, const int64_t* chunks, Arrays buckets, int num_buckets, Scalars s, double* partials) {
  const la_segment& segment = segments[chunks[2 * (int64_t)blockIdx.x]];
  int64_t start = chunks[2 * (int64_t)blockIdx.x + 1] * LA_CHUNK;
  Arrays arrays;
#pragma unroll
  for (int k = 1; k < Op::kArrays; k++)
    arrays.p[k] = k <= num_buckets ? (void*)((float*)buckets.p[k - 1] + segment.offset) : (void*)segment.rest;
  arrays.p[0] = segment.x;
  chunk<Op, P, kNorms>(arrays, start, length_of_chunk(start, segment.numel), s, kNorms ? partials + (int64_t)blockIdx.x * kMaxNorms : nullptr);
}

// One block adds `width` interleaved rows of partial sums, in a fixed order.
__global__ void __launch_bounds__(kThreads, 2) sum_kernel(const double* partials, int64_t count, int width, double* out) {
  for (int j = 0; j < width; j++) {
    double sum = 0.0;
    for (int64_t c = threadIdx.x; c < count; c += kThreads) sum += partials[c * width + j];
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[j] = sum;
  }
}

__device__ __forceinline__ double element(int format, const void* a, int64_t i) {
  if (format == LA_FP32) return (double)((const float*)a)[i];
  uint16_t raw = ((const uint16_t*)a)[i];
  return (double)(format == LA_BF16 ? Bf16::load(raw) : Fp16::load(raw));
}

__global__ void __launch_bounds__(kThreads, 2)
    square_kernel(int format_a, const void* a, int format_b, const void* b, int64_t n, double* partials) {
  int64_t start = (int64_t)blockIdx.x * LA_CHUNK;
  int length = length_of_chunk(start, n);
  double sum = 0.0;
  bool plain = format_a == LA_FP32 && (!b || format_b == LA_FP32) && (((uintptr_t)a | (uintptr_t)b) & 15) == 0;
  int whole = plain ? length / 4 * 4 : 0;
  for (int i = (int)threadIdx.x * 4; i < whole; i += kThreads * 4) {
    float u[4], v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    load_many<Fp32, 4>((const float*)a + start + i, u);
    if (b) load_many<Fp32, 4>((const float*)b + start + i, v);
    for (int j = 0; j < 4; j++) {
      double d = (double)u[j] - (double)v[j];
      sum += d * d;
    }
  }
  for (int i = whole + (int)threadIdx.x; i < length; i += kThreads) {
    double d = element(format_a, a, start + i) - (b ? element(format_b, b, start + i) : 0.0);
    sum += d * d;
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// Compression: one warp per block of 256 elements, 8 consecutive ones per lane.
constexpr int kLane = kBlock / 32, kWarps = kThreads / 32;

__device__ __forceinline__ void load_lane(const float* from, int n, float* v) {
  if (n == kLane && ((uintptr_t)from & 15) == 0) {
    load_many<Fp32, kLane>(from, v);
  } else {
#pragma unroll
    for (int j = 0; j < kLane; j++) v[j] = j < n ? from[j] : 0.0f;
  }
}

__device__ __forceinline__ void store_lane(float* to, int n, const float* v) {
  if (n == kLane && ((uintptr_t)to & 15) == 0) {
    store_many<Fp32, kLane>(to, v);
  } else {
#pragma unroll
    for (int j = 0; j < kLane; j++)
      if (j < n) to[j] = v[j];
  }
}

// 8 codes, in the widest accesses that their address allows
template <class T>
__device__ __forceinline__ void load_codes(const T* from, int n, T* codes) {
  constexpr int kStep = 8 / sizeof(T) > 0 ? 8 / (int)sizeof(T) : 1;
  if (n == kLane && ((uintptr_t)from & 7) == 0) {
#pragma unroll
    for (int j = 0; j < kLane; j += kStep) {
      uint2 raw = *reinterpret_cast<const uint2*>(from + j);
      memcpy(codes + j, &raw, 8);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kLane; j++) codes[j] = j < n ? from[j] : (T)0;
  }
}

template <class T>
__device__ __forceinline__ void store_codes(T* to, int n, const T* codes) {
  constexpr int kStep = 8 / sizeof(T) > 0 ? 8 / (int)sizeof(T) : 1;
  if (n == kLane && ((uintptr_t)to & 7) == 0) {
#pragma unroll
    for (int j = 0; j < kLane; j += kStep) {
      uint2 raw;
      memcpy(&raw, codes + j, 8);
      *reinterpret_cast<uint2*>(to + j) = raw;
    }
  } else {
#pragma unroll
    for (int j = 0; j < kLane; j++)
      if (j < n) to[j] = codes[j];
  }
}

struct TwoBitCodec {};

// v becomes the residual; `at` is the lane's first element, `n` how many it has. Every lane of the warp calls this.
template <class C>
struct Encoder {
  __device__ __forceinline__ static void run(float* v, void* codes, float* scales, int64_t block, int64_t at, int n, float) {
    float scale = 0.0f;
    if (C::kScaled) {
      uint32_t largest = 0;
#pragma unroll
      for (int j = 0; j < kLane; j++) largest = magnitude(v[j]) > largest ? magnitude(v[j]) : largest;
      for (int other = 16; other > 0; other /= 2) {
        uint32_t theirs = __shfl_xor_sync(0xffffffffu, largest, other);
        largest = theirs > largest ? theirs : largest;
      }
      scale = block_scale(largest, C::kLargest);
      if (threadIdx.x % 32 == 0 && n > 0) scales[block] = scale;
    }
    typename C::Code out[kLane];
#pragma unroll
    for (int j = 0; j < kLane; j++) {
      out[j] = C::encode(v[j], scale);
      v[j] = residual_of<C>(v[j], out[j], scale);
    }
    store_codes((typename C::Code*)codes + at, n, out);
  }
};

template <>
struct Encoder<TwoBitCodec> {
  __device__ __forceinline__ static void run(float* v, void* codes, float*, int64_t, int64_t at, int n, float threshold) {
    uint32_t packed = 0;
#pragma unroll
    for (int j = 0; j < kLane; j++) {
      uint32_t code = j < n ? two_bit_encode(v[j], threshold) : 0u;
      packed |= code << (2 * j);
      v[j] = two_bit_residual(v[j], code, threshold);
    }
    uint8_t* out = (uint8_t*)codes + at / 4;
    if (n > 0) out[0] = (uint8_t)packed;
    if (n > 4) out[1] = (uint8_t)(packed >> 8);
  }
};

template <class C>
struct Decoder {
  __device__ __forceinline__ static void run(const void* codes, const float* scales, int64_t peer, int64_t n, int64_t block,
                                             int64_t at, int m, float, float* v) {
    typename C::Code in[kLane];
    load_codes((const typename C::Code*)codes + peer * n + at, m, in);
    float scale = C::kScaled && m > 0 ? scales[peer * ((n + kBlock - 1) / kBlock) + block] : 0.0f;
#pragma unroll
    for (int j = 0; j < kLane; j++) v[j] = C::decode(in[j], scale);
  }
};

template <>
struct Decoder<TwoBitCodec> {
  __device__ __forceinline__ static void run(const void* codes, const float*, int64_t peer, int64_t n, int64_t, int64_t at,
                                             int m, float threshold, float* v) {
    const uint8_t* in = (const uint8_t*)codes + peer * ((n + 3) / 4) + at / 4;
    uint32_t packed = (m > 0 ? in[0] : 0u) | (m > 4 ? (uint32_t)in[1] << 8 : 0u);
#pragma unroll
    for (int j = 0; j < kLane; j++) v[j] = two_bit_decode((packed >> (2 * j)) & 3u, threshold);
  }
};

__device__ __forceinline__ int length_of_lane(int64_t at, int64_t n) {
  return (int)(at >= n ? 0 : (n - at < kLane ? n - at : kLane));
}

template <class C>
__global__ void __launch_bounds__(kThreads, 2)
    quantize_kernel(void* codes, float* scales, const float* source, float* residual, int64_t n, float threshold) {
  int64_t block = (int64_t)blockIdx.x * kWarps + threadIdx.x / 32, at = block * kBlock + (threadIdx.x % 32) * kLane;
  int m = length_of_lane(at, n);
  float v[kLane], rest[kLane];
  load_lane(source + at, m, v);
  load_lane(residual + at, m, rest);
#pragma unroll
  for (int j = 0; j < kLane; j++) v[j] = v[j] + rest[j];
  Encoder<C>::run(v, codes, scales, block, at, m, threshold);
  store_lane(residual + at, m, v);
}

template <class C, class Again, bool kAgain>
__global__ void __launch_bounds__(kThreads, 2)
    average_kernel(const void* codes, const float* scales, const float* weights, int64_t peers, int64_t n, float threshold,
                   float* out, void* out_codes, float* out_scales, float* residual) {
  int64_t block = (int64_t)blockIdx.x * kWarps + threadIdx.x / 32, at = block * kBlock + (threadIdx.x % 32) * kLane;
  int m = length_of_lane(at, n);
  float v[kLane], sum[kLane];
  for (int64_t k = 0; k < peers; k++) {
    Decoder<C>::run(codes, scales, k, n, block, at, m, threshold, v);
    float w = weights[k];
#pragma unroll
    for (int j = 0; j < kLane; j++) {
      float term = w * v[j];
      sum[j] = k == 0 ? term : sum[j] + term;
    }
  }
  if (kAgain) {
    float rest[kLane];
    load_lane(residual + at, m, rest);
#pragma unroll
    for (int j = 0; j < kLane; j++) sum[j] = j < m ? sum[j] + rest[j] : 0.0f;
    Encoder<Again>::run(sum, out_codes, out_scales, block, at, m, threshold);
    store_lane(residual + at, m, sum);
  } else if (out) {
    store_lane(out + at, m, sum);
  }
}

using FlatLaunch = void (*)(int64_t blocks, void* stream, Arrays, int64_t n, Scalars, double* partials);
using ListLaunch = void (*)(int64_t blocks, void* stream, const la_segment*, const int64_t* chunks, Arrays buckets, int num_buckets, Scalars, double* partials);

template <class Op, class P>
void launch_flat(int64_t blocks, void* stream, Arrays arrays, int64_t n, Scalars s, double* partials) {
  if (partials) LA_LAUNCH((flat_kernel<Op, P, true>), blocks, kThreads, stream, arrays, n, s, partials);
  else LA_LAUNCH((flat_kernel<Op, P, false>), blocks, kThreads, stream, arrays, n, s, partials);
}

template <class Op, class P>
void launch_list(int64_t blocks, void* stream, const la_segment* segments, const int64_t* chunks, Arrays buckets, int num_buckets, Scalars s, double* partials) {
  if (partials) LA_LAUNCH((list_kernel<Op, P, true>), blocks, kThreads, stream, segments, chunks, buckets, num_buckets, s, partials);
  else LA_LAUNCH((list_kernel<Op, P, false>), blocks, kThreads, stream, segments, chunks, buckets, num_buckets, s, partials);
}

struct Entry {
  const char* name;
  FlatLaunch flat[3];
  ListLaunch list[3];
  int arrays;
};

template <class Op>
Entry entry(const char* name) {
  return {name,
          {launch_flat<Op, Fp32>, launch_flat<Op, Bf16>, launch_flat<Op, Fp16>},
          {launch_list<Op, Fp32>, launch_list<Op, Bf16>, launch_list<Op, Fp16>},
          Op::kArrays};
}

#define LA_STRIP(...) __VA_ARGS__
#define LA_ENTRY(name, functor) entry<LA_STRIP functor>(name),
const Entry kTable[] = {LA_ELEMENTWISE(LA_ENTRY)};
constexpr int kCount = sizeof kTable / sizeof kTable[0];

int64_t chunks_of(int64_t n) { return (n + LA_CHUNK - 1) / LA_CHUNK; }

Scalars scalars_of(const float* from) {
  Scalars s;
  memcpy(s.v, from, sizeof s.v);
  return s;
}

int status() { return (int)cudaGetLastError(); }

template <class C>
void launch_average(const void* codes, const float* scales, const float* weights, int64_t peers, int64_t n, float threshold,
                    float* out, void* out_codes, float* out_scales, float* residual, int64_t blocks, void* stream) {
  if (out_codes)
    LA_LAUNCH((average_kernel<C, C, true>), blocks, kThreads, stream, codes, scales, weights, peers, n, threshold, out, out_codes, out_scales, residual);
  else
    LA_LAUNCH((average_kernel<C, TwoBitCodec, false>), blocks, kThreads, stream, codes, scales, weights, peers, n, threshold, out, out_codes, out_scales, residual);
}

}  // namespace

LA_EXPORT int la_abi_version() { return LA_ABI_VERSION; }

LA_EXPORT int la_find(const char* name) {
  for (int i = 0; i < kCount; i++)
    if (!strcmp(kTable[i].name, name)) return i;
  return LA_BAD_ARGUMENT;
}

LA_EXPORT int la_cuda_devices(int* count, int* driver) {
  *count = *driver = 0;
  cudaDriverGetVersion(driver);
  return (int)cudaGetDeviceCount(count);
}

// The library has a CUDA runtime of its own: the caller says on which device the pointers and the stream are.
LA_EXPORT int la_cuda_use_device(int device) { return (int)cudaSetDevice(device); }

// `workspace` holds two doubles per chunk of 65,536 elements and `norms` two, where norms are wanted (else null).
LA_EXPORT int la_cuda_flat(int op, int format, void* const* arrays, int64_t n, const float* scalars, double* norms,
                           double* workspace, void* stream) {
  if (op < 0 || op >= kCount || format < 0 || format > 2 || n < 0 || (norms && !workspace)) return LA_BAD_ARGUMENT;
  Arrays a = {};
  for (int k = 0; k < kTable[op].arrays; k++) a.p[k] = arrays[k];
  if (n) kTable[op].flat[format](chunks_of(n), stream, a, n, scalars_of(scalars), norms ? workspace : nullptr);
  if (norms) LA_LAUNCH(sum_kernel, 1, kThreads, stream, workspace, chunks_of(n), kMaxNorms, norms);
  return status();
}

// Segments of one op and format; `segments` and `chunks` lie on the device. `partials` gets two doubles per chunk, or is
// null; la_cuda_sum adds them up.
LA_EXPORT int la_cuda_list(int op, int format, const la_segment* segments, const int64_t* chunks, int64_t num_chunks,
                           float* const* buckets, int num_buckets, const float* scalars, double* partials, void* stream) {
  if (op < 0 || op >= kCount || format < 0 || format > 2 || num_chunks < 0) return LA_BAD_ARGUMENT;
  if (kTable[op].arrays < 1 + num_buckets || kTable[op].arrays > 2 + num_buckets) return LA_BAD_ARGUMENT;
  Arrays b = {};
  for (int k = 0; k < num_buckets; k++) b.p[k] = buckets[k];
  if (num_chunks) kTable[op].list[format](num_chunks, stream, segments, chunks, b, num_buckets, scalars_of(scalars), partials);
  return status();
}

LA_EXPORT int la_cuda_sum(const double* partials, int64_t count, double* norms, void* stream) {
  LA_LAUNCH(sum_kernel, 1, kThreads, stream, partials, count, kMaxNorms, norms);
  return status();
}

// `workspace` holds one double per chunk.
LA_EXPORT int la_cuda_square(int format_a, const void* a, int format_b, const void* b, int64_t n, double* out,
                             double* workspace, void* stream) {
  if (format_a < 0 || format_a > 2 || format_b < 0 || format_b > 2 || n < 0) return LA_BAD_ARGUMENT;
  if (n) LA_LAUNCH(square_kernel, chunks_of(n), kThreads, stream, format_a, a, format_b, b, n, workspace);
  LA_LAUNCH(sum_kernel, 1, kThreads, stream, workspace, chunks_of(n), 1, out);
  return status();
}

LA_EXPORT int la_cuda_quantize(int format, void* codes, float* scales, const float* source, float* residual, int64_t n,
                               float threshold, void* stream) {
  if (format < 0 || format > kTwoBit || n < 0) return LA_BAD_ARGUMENT;
  int64_t blocks = (n + kBlock * kWarps - 1) / (kBlock * kWarps);
  if (!n) return LA_OK;
  if (format == kInt8) LA_LAUNCH(quantize_kernel<Int8Codec>, blocks, kThreads, stream, codes, scales, source, residual, n, threshold);
  else if (format == kFloat8) LA_LAUNCH(quantize_kernel<Float8Codec>, blocks, kThreads, stream, codes, scales, source, residual, n, threshold);
  else if (format == kBFloat16) LA_LAUNCH(quantize_kernel<BFloat16Codec>, blocks, kThreads, stream, codes, scales, source, residual, n, threshold);
  else LA_LAUNCH(quantize_kernel<TwoBitCodec>, blocks, kThreads, stream, codes, scales, source, residual, n, threshold);
  return status();
}

// The weights are on the device.
LA_EXPORT int la_cuda_average(int format, const void* codes, const float* scales, const float* weights, int64_t peers,
                              int64_t n, float threshold, float* out, void* out_codes, float* out_scales, float* residual,
                              void* stream) {
  if (format < 0 || format > kTwoBit || peers < 1 || n < 0) return LA_BAD_ARGUMENT;
  int64_t blocks = (n + kBlock * kWarps - 1) / (kBlock * kWarps);
  if (n) {
#define LA_AVERAGE(C) launch_average<C>(codes, scales, weights, peers, n, threshold, out, out_codes, out_scales, residual, blocks, stream)
    if (format == kInt8) LA_AVERAGE(Int8Codec);
    else if (format == kFloat8) LA_AVERAGE(Float8Codec);
    else if (format == kBFloat16) LA_AVERAGE(BFloat16Codec);
    else LA_AVERAGE(TwoBitCodec);
  }
  return status();
}
