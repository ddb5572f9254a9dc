// The CPU library's interface: picks the kernels for this processor, and what needs no vector code.
#include <stdlib.h>
#include <string.h>

#include "cpu_kernels.h"
#include "elementwise.h"

namespace {

struct Level {
  const char* name;
  const la_cpu_kernels* kernels;
};

// From the best to the plainest; only those that the build compiled.
const Level kLevels[] = {
#if defined(LA_X86_64_LEVELS)
    {"x86-64-v4", &la_cpu_kernels_v4},
    {"x86-64-v3", &la_cpu_kernels_v3},
    {"x86-64-v2", &la_cpu_kernels_v2},
#endif
    {"portable", &la_cpu_kernels_portable},
};
constexpr int kNumLevels = sizeof kLevels / sizeof kLevels[0];

bool supported(const char* name) {
#if defined(LA_X86_64_LEVELS)
  __builtin_cpu_init();
  if (!strcmp(name, "x86-64-v4"))
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!strcmp(name, "x86-64-v3"))
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
           __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx");
  if (!strcmp(name, "x86-64-v2")) return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt");
#endif
  return !strcmp(name, "portable");
}

const Level* best() {
  for (const Level& level : kLevels)
    if (supported(level.name)) return &level;
  return &kLevels[kNumLevels - 1];
}

const Level* current = best();

#define LA_NAME(name, functor) name,
const char* const kNames[] = {LA_ELEMENTWISE(LA_NAME)};
constexpr int kCount = sizeof kNames / sizeof kNames[0];

}  // namespace

LA_EXPORT int la_abi_version() { return LA_ABI_VERSION; }

LA_EXPORT int la_find(const char* name) {
  for (int i = 0; i < kCount; i++)
    if (!strcmp(kNames[i], name)) return i;
  return LA_BAD_ARGUMENT;
}

LA_EXPORT const char* la_cpu_level() { return current->name; }

// Use another level than the best one, to test and to compare; refused where the processor lacks it.
LA_EXPORT int la_cpu_use_level(const char* name) {
  for (const Level& level : kLevels)
    if (!strcmp(level.name, name) && supported(name)) {
      current = &level;
      return LA_OK;
    }
  return LA_BAD_ARGUMENT;
}

// `whole`: elements of the arrays that these are a piece of; caches are written around where those are larger.
LA_EXPORT int la_cpu_flat(int op, int format, void* const* arrays, int64_t n, int64_t whole, const float* scalars,
                          double* norms, int threads) {
  return current->kernels->flat(op, format, arrays, n, whole, scalars, norms, threads);
}

LA_EXPORT int la_cpu_list(const la_segment* segments, int64_t count, float* const* buckets, int num_buckets,
                          const float* scalars, double* norms, int threads) {
  return current->kernels->list(segments, count, buckets, num_buckets, scalars, norms, threads);
}

LA_EXPORT int la_cpu_square(int format_a, const void* a, int format_b, const void* b, int64_t n, double* out,
                            int threads) {
  return current->kernels->square(format_a, a, format_b, b, n, out, threads);
}

LA_EXPORT int la_cpu_quantize(int format, void* codes, float* scales, const float* source, float* residual, int64_t n,
                              float threshold, int threads) {
  return current->kernels->quantize(format, codes, scales, source, residual, n, threshold, threads);
}

LA_EXPORT int la_cpu_average(int format, const void* codes, const float* scales, const float* weights, int64_t peers,
                             int64_t n, float threshold, float* out, void* out_codes, float* out_scales,
                             float* residual, int threads) {
  return current->kernels->average(format, codes, scales, weights, peers, n, threshold, out, out_codes, out_scales,
                                   residual, threads);
}

// The k elements of source + residual that are largest in magnitude (NaN above all; of equal ones the first), in
// ascending order of their indices; the residual keeps the others. Three passes: a histogram of the upper halves of the
// magnitudes, one of the lower halves within the bin that holds the k-th, then the selection.
LA_EXPORT int la_cpu_topk(const float* source, float* residual, int64_t n, int64_t k, float* values, int64_t* indices) {
  using namespace la;
  if (n < 0 || k < 0 || k > n) return LA_BAD_ARGUMENT;
  int64_t* bins = (int64_t*)calloc(65536, sizeof(int64_t));
  if (!bins) return LA_NO_MEMORY;
  auto key = [](float v) { return magnitude(v) > kInfinity ? kNaN : magnitude(v); };
  for (int64_t i = 0; i < n; i++) {
    residual[i] = source[i] + residual[i];
    bins[key(residual[i]) >> 16]++;
  }
  int64_t above = 0;
  int high = 65535;
  for (; high > 0 && above + bins[high] < k; high--) above += bins[high];
  memset(bins, 0, 65536 * sizeof(int64_t));
  for (int64_t i = 0; i < n; i++)
    if ((int)(key(residual[i]) >> 16) == high) bins[key(residual[i]) & 0xffffu]++;
  int low = 65535;
  for (; low > 0 && above + bins[low] < k; low--) above += bins[low];
  uint32_t edge = ((uint32_t)high << 16) | (uint32_t)low;
  int64_t ties = k - above, taken = 0;  // elements equal to the edge that are taken
  for (int64_t i = 0; i < n && taken < k; i++) {
    uint32_t mine = key(residual[i]);
    if (mine < edge || (mine == edge && ties-- <= 0)) continue;
    values[taken] = residual[i];
    indices[taken++] = i;
    residual[i] = 0.0f;
  }
  free(bins);
  return LA_OK;
}

// out[indices] += weight * values, in their order.
LA_EXPORT int la_cpu_scatter(float* out, int64_t n, const float* values, const int64_t* indices, int64_t k,
                             float weight) {
  for (int64_t j = 0; j < k; j++)
    if (indices[j] < 0 || indices[j] >= n) return LA_BAD_INDEX;
  for (int64_t j = 0; j < k; j++) {
    float term = weight * values[j];
    out[indices[j]] = out[indices[j]] + term;
  }
  return LA_OK;
}
