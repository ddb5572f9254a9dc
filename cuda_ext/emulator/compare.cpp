// Runs every kernel of cuda.cu under the emulator and compares it, to the bit, with the CPU library's kernels. Sizes
// around vectors, blocks and chunks, aligned and not; every buffer has its exact size, so that the address sanitizer
// sees any access beyond it. It is linked with both: cuda.cu as C++, and cpu_kernels.cpp.
#include <stdio.h>
#include <stdlib.h>

#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "codecs.h"
#include "cpu_kernels.h"
#include "elementwise.h"

LA_EXPORT int la_find(const char*);
LA_EXPORT int la_cuda_flat(int, int, void* const*, int64_t, const float*, double*, double*, void*);
LA_EXPORT int la_cuda_list(int, int, const la_segment*, const int64_t*, int64_t, float* const*, int, const float*, double*, void*);
LA_EXPORT int la_cuda_sum(const double*, int64_t, double*, void*);
LA_EXPORT int la_cuda_square(int, const void*, int, const void*, int64_t, double*, double*, void*);
LA_EXPORT int la_cuda_quantize(int, void*, float*, const float*, float*, int64_t, float, void*);
LA_EXPORT int la_cuda_average(int, const void*, const float*, const float*, int64_t, int64_t, float, float*, void*, float*, float*, void*);

namespace {
using namespace la;

#define LA_STRIP(...) __VA_ARGS__
#define LA_ENTRY(name, functor) {name, LA_STRIP functor ::kArrays},
const struct {
  const char* name;
  int arrays;
} kTable[] = {LA_ELEMENTWISE(LA_ENTRY)};
constexpr int kCount = sizeof kTable / sizeof kTable[0];

int64_t chunks_of(int64_t n) { return (n + LA_CHUNK - 1) / LA_CHUNK; }

std::mt19937 random_bits(1);
int comparisons = 0;

// A buffer of exactly `bytes`, that begins `offset` bytes behind a 16-byte boundary.
struct Buffer {
  std::unique_ptr<char[]> memory;
  size_t offset, bytes;

  Buffer(size_t bytes, size_t offset) : memory(new char[bytes + offset]), offset(offset), bytes(bytes) {
    if ((uintptr_t)memory.get() % 16) abort();
  }
  Buffer(const Buffer& other) : Buffer(other.bytes, other.offset) { memcpy(data(), other.data(), bytes); }
  Buffer(Buffer&&) = default;
  char* data() const { return memory.get() + offset; }
};

float random_float() {
  static const float special[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 1e-45f, 3e38f, 65520.0f, 448.0f};
  if (random_bits() % 64 == 0) return special[random_bits() % 9];
  return ldexpf((float)(int32_t)random_bits() / 2147483648.0f, (int)(random_bits() % 20) - 10);
}

Buffer floats(int64_t n, size_t offset, bool positive = false) {
  Buffer out(4 * (size_t)n, offset);
  for (int64_t i = 0; i < n; i++) {
    float v = random_float();
    if (positive) v = std::fabs(v);
    memcpy(out.data() + 4 * i, &v, 4);
  }
  return out;
}

// In the format of array 0: fp32, bf16, fp16.
Buffer parameters(int format, int64_t n, size_t offset) {
  if (format == 0) return floats(n, offset);
  Buffer out(2 * (size_t)n, offset / 2);
  for (int64_t i = 0; i < n; i++) {
    uint16_t v = format == 1 ? Bf16::store(random_float()) : Fp16::store(random_float());
    memcpy(out.data() + 2 * i, &v, 2);
  }
  return out;
}

Buffer bytes(int64_t n, size_t offset) {
  Buffer out((size_t)n, offset);
  for (int64_t i = 0; i < n; i++) out.data()[i] = (char)random_bits();
  return out;
}

bool is_nan(int width, const char* at) {
  uint32_t v = 0;
  memcpy(&v, at, (size_t)width);
  if (width == 4) return (v & 0x7fffffffu) > 0x7f800000u;
  return false;
}

void same(const Buffer& a, const Buffer& b, int width, int format, const char* what, int64_t n) {
  comparisons++;
  for (size_t i = 0; i < a.bytes; i += (size_t)width) {
    if (!memcmp(a.data() + i, b.data() + i, (size_t)width)) continue;
    if (is_nan(width, a.data() + i) && is_nan(width, b.data() + i)) continue;
    if (width == 2) {
      uint16_t u, v;
      memcpy(&u, a.data() + i, 2), memcpy(&v, b.data() + i, 2);
      float x = format == 2 ? Fp16::load(u) : Bf16::load(u), y = format == 2 ? Fp16::load(v) : Bf16::load(v);
      if (x != x && y != y) continue;
    }
    printf("%s, %lld elements, format %d: differs at byte %zu\n", what, (long long)n, format, i);
    exit(1);
  }
}

void close(double a, double b, const char* what) {
  comparisons++;
  if (a == b || (a != a && b != b) || std::fabs(a - b) <= 1e-12 * std::fabs(b)) return;
  printf("%s: %.17g is not %.17g\n", what, a, b);
  exit(1);
}

#define CHECK(call)                                       \
  if (int status = (call)) {                              \
    printf("%s returned %d\n", #call, status), exit(1);   \
  }

void elementwise(int op, int format, int64_t n, size_t offset) {
  const float scalars[kMaxScalars] = {0.7f, 0.9f, 0.3f, 1.0f, 0.5f, 0.04f, 0.1f, 0.9f, random_bits() % 2 ? 0.01f : 0.0f, 0.99f};
  int count = kTable[op].arrays;
  std::vector<Buffer> mine;
  mine.push_back(parameters(format, n, offset));
  for (int k = 1; k < count; k++) mine.push_back(floats(n, offset, k == 3));
  std::vector<Buffer> theirs(mine.begin(), mine.end());
  std::vector<void*> a, b;
  for (auto& buffer : mine) a.push_back(buffer.data());
  for (auto& buffer : theirs) b.push_back(buffer.data());
  std::vector<double> work(2 * (size_t)chunks_of(n) + 2);
  double mine_norms[2], their_norms[2];
  bool norms = random_bits() % 2;
  CHECK(la_cuda_flat(op, format, a.data(), n, scalars, norms ? mine_norms : nullptr, work.data(), nullptr));
  CHECK(la_cpu_kernels_portable.flat(op, format, b.data(), n, n, scalars, norms ? their_norms : nullptr, 1));
  for (int k = 0; k < count; k++) same(mine[k], theirs[k], k || !format ? 4 : 2, format, kTable[op].name, n);
  for (int j = 0; norms && j < 2; j++) close(mine_norms[j], their_norms[j], kTable[op].name);
}

// Two tensors of one format in a bucket, with remainders: pack, then move.
void lists(int format, int64_t n) {
  int64_t sizes[] = {n, 37};
  for (const char* name : {"pack_rest", "move_rest"}) {
    int op = la_find(name), buckets = name[0] == 'p' ? 1 : 2;
    std::vector<Buffer> all[2];
    std::vector<la_segment> segments[2];
    for (int64_t size : sizes) {
      all[0].push_back(parameters(format, size, 0));
      all[0].push_back(floats(size, 0));
    }
    for (int k = 0; k < buckets; k++) all[0].push_back(floats(n + 37, 0));
    for (auto& buffer : all[0]) all[1].push_back(Buffer(buffer));
    float* bases[2][2] = {};
    for (int side = 0; side < 2; side++) {
      int64_t offset = 0;
      for (int i = 0; i < 2; offset += sizes[i++])
        segments[side].push_back({all[side][2 * i].data(), (float*)all[side][2 * i + 1].data(), offset, sizes[i], op, format});
      for (int k = 0; k < buckets; k++) bases[side][k] = (float*)all[side][4 + k].data();
    }
    std::vector<int64_t> chunks;
    for (int i = 0; i < 2; i++)
      for (int64_t c = 0; c < chunks_of(sizes[i]); c++) chunks.push_back(i), chunks.push_back(c);
    std::vector<double> work(chunks.size());
    double mine[2], theirs[2];
    float scalars[kMaxScalars] = {0.25f};
    CHECK(la_cuda_list(op, format, segments[0].data(), chunks.data(), (int64_t)chunks.size() / 2, bases[0], buckets, scalars, work.data(), nullptr));
    CHECK(la_cuda_sum(work.data(), (int64_t)chunks.size() / 2, mine, nullptr));
    CHECK(la_cpu_kernels_portable.list(segments[1].data(), 2, bases[1], buckets, scalars, theirs, 1));
    for (size_t k = 0; k < all[0].size(); k++) same(all[0][k], all[1][k], k < 4 && k % 2 == 0 && format ? 2 : 4, format, name, n);
    close(mine[0], theirs[0], name);
  }
}

void squares(int64_t n, size_t offset) {
  for (int format = 0; format < 3; format++) {
    Buffer a = parameters(format, n, offset), b = floats(n, offset);
    std::vector<double> work((size_t)chunks_of(n) + 1);
    for (const void* other : {(const void*)b.data(), (const void*)nullptr}) {
      double mine, theirs;
      CHECK(la_cuda_square(format, a.data(), 0, other, n, &mine, work.data(), nullptr));
      CHECK(la_cpu_kernels_portable.square(format, a.data(), 0, other, n, &theirs, 1));
      close(mine, theirs, "square");
    }
  }
}

void compression(int format, int64_t n, size_t offset) {
  static const int kWidth[] = {1, 1, 2, 1};
  int64_t blocks = (n + kBlock - 1) / kBlock, peers = 3, bytes_of_codes = format == kTwoBit ? (n + 3) / 4 : n * kWidth[format];
  float weights[] = {0.2f, 0.3f, 0.5f};
  Buffer source = floats(n, offset), residual = floats(n, offset), codes = bytes(bytes_of_codes, 0), scales = floats(blocks, 0);
  Buffer their_residual = residual, their_codes = codes, their_scales = scales;
  CHECK(la_cuda_quantize(format, codes.data(), (float*)scales.data(), (float*)source.data(), (float*)residual.data(), n, 0.5f, nullptr));
  CHECK(la_cpu_kernels_portable.quantize(format, their_codes.data(), (float*)their_scales.data(), (float*)source.data(), (float*)their_residual.data(), n, 0.5f, 1));
  same(codes, their_codes, kWidth[format], kBFloat16, "quantize", n);
  same(residual, their_residual, 4, 0, "residual", n);
  same(scales, their_scales, 4, 0, "scales", n);
  Buffer messages = bytes(peers * bytes_of_codes, 0), all_scales = floats(peers * blocks, 0, true);
  Buffer out = floats(n, offset), their_out = out;
  CHECK(la_cuda_average(format, messages.data(), (float*)all_scales.data(), weights, peers, n, 0.5f, (float*)out.data(), nullptr, nullptr, nullptr, nullptr));
  CHECK(la_cpu_kernels_portable.average(format, messages.data(), (float*)all_scales.data(), weights, peers, n, 0.5f, (float*)their_out.data(), nullptr, nullptr, nullptr, 1));
  same(out, their_out, 4, 0, "average", n);
  Buffer rest = floats(n, offset), their_rest = rest, again = bytes(bytes_of_codes, 0), their_again = again, new_scales = floats(blocks, 0), their_new = new_scales;
  CHECK(la_cuda_average(format, messages.data(), (float*)all_scales.data(), weights, peers, n, 0.5f, nullptr, again.data(), (float*)new_scales.data(), (float*)rest.data(), nullptr));
  CHECK(la_cpu_kernels_portable.average(format, messages.data(), (float*)all_scales.data(), weights, peers, n, 0.5f, nullptr, their_again.data(), (float*)their_new.data(), (float*)their_rest.data(), 1));
  same(again, their_again, kWidth[format], kBFloat16, "requantize", n);
  same(rest, their_rest, 4, 0, "residual of the mean", n);
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1 && !strcmp(arguments[1], "overrun")) {
    Buffer small = floats(10, 0), large = floats(11, 0);
    float scalars[kMaxScalars] = {0.5f};
    void* arrays[] = {large.data(), small.data()};
    return la_cuda_flat(la_find("accumulate"), 0, arrays, 11, scalars, nullptr, nullptr, nullptr);
  }
  const int64_t sizes[] = {0, 1, 7, 33, 2049};
  for (int op = 0; op < kCount; op++)
    for (int format = 0; format < 3; format++)
      for (int64_t n : sizes)
        for (size_t offset : {(size_t)0, (size_t)4}) elementwise(op, format, n, offset);
  elementwise(la_find("accumulate"), 0, 2 * LA_CHUNK + 5, 0);
  elementwise(la_find("outer_merge_sent"), 1, LA_CHUNK + 9, 0);
  for (int format = 0; format < 3; format++) lists(format, 1001);
  for (int64_t n : {(int64_t)0, (int64_t)5, (int64_t)1030, LA_CHUNK + 3}) squares(n, n % 2 ? 4 : 0);
  for (int format = 0; format <= kTwoBit; format++)
    for (int64_t n : {(int64_t)1, (int64_t)255, (int64_t)256, (int64_t)2050, (int64_t)4097})
      for (size_t offset : {(size_t)0, (size_t)4}) compression(format, n, offset);
  printf("%d comparisons agree\n", comparisons);
  return 0;
}
