// Included before Highway: which instruction sets the kernels are compiled for. Those without fused
// multiply-add (SSE) would give other bits; Highway's fallback target stands for them, and runs the
// scalar reference instead. SVE's vectors have no size at compile time, which the kernels need;
// such machines use NEON.
#pragma once

// AVX3_DL adds nothing that they use, and Highway 1.0.3 cannot have it as what the compiler
// assumes.
#define HWY_DISABLED_TARGETS                                                                   \
  (HWY_AVX3_DL | STOKER_OPTIM_SSE2 | HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | \
   HWY_SVE2_128)
// HWY_SSE2 since Highway 1.0.4; earlier versions, which have no such target, keep the bit free.
#define STOKER_OPTIM_SSE2 (1LL << 14)
// The fallback is compiled also where the compiler may assume more: tests compare it everywhere.
#define HWY_COMPILE_ALL_ATTAINABLE

// Inside a target's code: does this target run the scalar reference?
#define STOKER_OPTIM_SCALAR (HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR)
