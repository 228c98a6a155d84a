// Numbers as vectors of floats, for any processor that torch has vectors for.

#pragma once

#include <ATen/cpu/vec/vec.h>
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <vector>

namespace {

using at::BFloat16;
using at::Half;
using Floats = at::vec::Vectorized<float>;
constexpr int64_t WIDTH = 2 * Floats::size();  // numbers that are computed together
#ifdef CPU_CAPABILITY_AVX2
constexpr int TOKENS = 6;  // as many at once as there are registers for their sums
#else
constexpr int TOKENS = 12;
#endif

// Floats as the compiler's own vector: only arrays of these stay in registers.
typedef float Lanes __attribute__((vector_size(4 * Floats::size())));
#define UNROLLED _Pragma("GCC unroll 16")

[[maybe_unused]] Lanes lanes(Floats floats) {
  Lanes same;
  floats.store(&same);
  return same;
}

[[maybe_unused]] std::tuple<Floats, Floats> widened(const Half* from) {
  return at::vec::convert_half_float(at::vec::Vectorized<Half>::loadu(from));
}

[[maybe_unused]] std::tuple<Floats, Floats> widened(const BFloat16* from) {
  return at::vec::convert_bfloat16_float(at::vec::Vectorized<BFloat16>::loadu(from));
}

[[maybe_unused]] std::tuple<Floats, Floats> widened(const float* from) {
  return {Floats::loadu(from), Floats::loadu(from + Floats::size())};
}

// Numbers as floats, followed by zeros up to `padded`.
template <typename Number>
void widen(const Number* from, int64_t size, float* to, int64_t padded) {
  int64_t n = 0;
  for (; n + WIDTH <= size; n += WIDTH) {
    auto [low, high] = widened(from + n);
    low.store(to + n);
    high.store(to + n + Floats::size());
  }
  for (; n < size; n++) to[n] = from[n];
  std::fill(to + size, to + padded, 0.f);
}

}  // namespace
