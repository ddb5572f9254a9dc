// What each instruction-set level of the CPU library provides; cpu_kernels.cpp is compiled once per level.
#pragma once
#include "abi.h"

struct la_cpu_kernels {
  int (*flat)(int op, int format, void* const* arrays, int64_t n, int64_t whole, const float* scalars, double* norms,
              int threads);
  int (*list)(const la_segment* segments, int64_t count, float* const* buckets, int num_buckets, const float* scalars,
              double* norms, int threads);
  int (*square)(int format_a, const void* a, int format_b, const void* b, int64_t n, double* out, int threads);
  int (*quantize)(int format, void* codes, float* scales, const float* source, float* residual, int64_t n,
                  float threshold, int threads);
  int (*average)(int format, const void* codes, const float* scales, const float* weights, int64_t peers, int64_t n,
                 float threshold, float* out, void* out_codes, float* out_scales, float* residual, int threads);
};

extern "C" const la_cpu_kernels la_cpu_kernels_portable, la_cpu_kernels_v2, la_cpu_kernels_v3, la_cpu_kernels_v4;
