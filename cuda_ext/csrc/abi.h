// The C interface. Every function returns 0, or a negative number for arguments it does not know, or (CUDA) an error
// of the driver. Pointers are to elements of the stated format; nothing is allocated for the caller, nothing is kept.
#pragma once
#include <stdint.h>

#define LA_ABI_VERSION 4
#if defined(__GNUC__)
#define LA_EXPORT extern "C" __attribute__((visibility("default")))
#else
#define LA_EXPORT extern "C"
#endif

enum la_format_of_array_0 { LA_FP32 = 0, LA_BF16 = 1, LA_FP16 = 2 };
enum la_error { LA_OK = 0, LA_BAD_ARGUMENT = -1, LA_BAD_INDEX = -2, LA_NO_MEMORY = -3 };

// One tensor of a list: its own memory, its place in the flat buckets, its format, and the op for it.
struct la_segment {
  void* x;
  float* rest;
  int64_t offset;
  int64_t numel;
  int32_t op;
  int32_t format;
};

constexpr int64_t LA_CHUNK = 65536;  // elements a CPU thread or a CUDA block takes at a time; norms are summed per chunk
