// Enough of CUDA to run cuda.cu as C++: blocks one after the other, the threads of a block as fibers (ucontext) that take
// turns at every barrier. Barriers and shuffles must be reached by all threads of a block, as on a GPU; where some
// threads end while others wait, the emulator stops the process. Address and undefined-behaviour sanitizers are told
// about the fibers.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <vector>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __shared__ static

struct uint4 {
  uint32_t x, y, z, w;
} __attribute__((aligned(16)));
struct uint2 {
  uint32_t x, y;
} __attribute__((aligned(8)));
struct la_dim {
  unsigned x;
};
static la_dim threadIdx, blockIdx;

typedef void* cudaStream_t;
static inline int cudaGetLastError() { return 0; }
static inline int cudaGetDeviceCount(int* count) { return *count = 1, 0; }
static inline int cudaDriverGetVersion(int* version) { return *version = 0, 0; }
static inline int cudaSetDevice(int device) { return device == 0 ? 0 : 101; }

namespace la_emulator {

constexpr size_t kStackBytes = 128 << 10;

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  void* fake_stack = nullptr;
  bool done = false;
};

static ucontext_t scheduler;
static void* scheduler_fake_stack;
static const void* scheduler_stack;
static size_t scheduler_stack_bytes;
static std::vector<Fiber> fibers;
static unsigned running;
static void (*body)(void*);
static void* body_argument;
static uint32_t slots[1024];

static void leave(bool for_good) {
  Fiber& me = fibers[running];
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(for_good ? nullptr : &me.fake_stack, scheduler_stack, scheduler_stack_bytes);
#endif
  me.done = for_good;
  swapcontext(&me.context, &scheduler);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(me.fake_stack, &scheduler_stack, &scheduler_stack_bytes);
#endif
}

static void start() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
  body(body_argument);
  leave(true);
}

static void enter(unsigned index) {
  running = index;
  threadIdx.x = index;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, fibers[index].stack.data(), kStackBytes);
#endif
  swapcontext(&scheduler, &fibers[index].context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#endif
}

static void run_block(unsigned threads) {
  if (fibers.size() < threads) fibers.resize(threads);
  for (unsigned t = 0; t < threads; t++) {
    Fiber& fiber = fibers[t];
    fiber.stack.resize(kStackBytes);
    fiber.done = false;
    fiber.fake_stack = nullptr;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, start, 0);
  }
  for (unsigned waiting = threads; waiting > 0;) {
    for (unsigned t = 0; t < threads; t++) enter(t);
    unsigned ended = 0;
    for (unsigned t = 0; t < threads; t++) ended += fibers[t].done;
    if (ended != 0 && ended != threads) {
      fprintf(stderr, "emulator: %u threads ended while %u wait at a barrier\n", ended, threads - ended);
      abort();
    }
    if (ended == threads) waiting = 0;
  }
}

template <class F>
void launch(int64_t blocks, unsigned threads, F run) {
  body = [](void* f) { (*(F*)f)(); };
  body_argument = &run;
  for (int64_t b = 0; b < blocks; b++) {
    blockIdx.x = (unsigned)b;
    run_block(threads);
  }
}

}  // namespace la_emulator

static inline void __syncthreads() { la_emulator::leave(false); threadIdx.x = la_emulator::running; }

static inline uint32_t __shfl_xor_sync(uint32_t, uint32_t value, int other) {
  unsigned me = threadIdx.x;
  la_emulator::slots[me] = value;
  __syncthreads();
  uint32_t theirs = la_emulator::slots[me ^ (unsigned)other];
  __syncthreads();
  return theirs;
}

#define LA_LAUNCH(kernel, blocks, threads, stream, ...) \
  ((void)(stream), la_emulator::launch(blocks, threads, [&] { (kernel)(__VA_ARGS__); }))
