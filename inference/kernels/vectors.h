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

[[maybe_unused]] int64_t padded_to(int64_t size, int64_t width) { return (size + width - 1) / width * width; }

// Turns rows of numbers, `count` and at most WIDTH, into columns: number k of row n goes to tile[k * WIDTH + n]. `rows`
// and `tile` have room for WIDTH * size numbers, with the size a multiple of a vector's. Missing rows are zero.
template <typename Number>
void transpose(const Number* from, int64_t step, int64_t count, int64_t size, float* rows, float* tile) {
  constexpr int64_t vector = Floats::size();
  int64_t padded = padded_to(size, vector);
  for (int64_t n = 0; n < count; n++) widen(from + n * step, size, rows + n * padded, padded);
  std::fill(rows + count * padded, rows + WIDTH * padded, 0.f);
  for (int64_t k = 0; k < padded; k += vector)
    for (int64_t n = 0; n < WIDTH; n += vector)
      at::vec::transpose_mxn<float, vector, vector>(rows + n * padded + k, padded, tile + k * WIDTH + n, WIDTH);
}

// Adds sum over k of left[t][k] * right[k][0..WIDTH) to found[t], or to zero if `fresh`, in the order of k.
template <int T, typename Number>
void multiply(const float* left, int64_t left_step, const Number* right, int64_t right_step, int64_t count,
              float* found, int64_t found_step, bool fresh) {
  Lanes low[T], high[T];
  UNROLLED for (int t = 0; t < T; t++) {
    low[t] = fresh ? Lanes{} : lanes(Floats::loadu(found + t * found_step));
    high[t] = fresh ? Lanes{} : lanes(Floats::loadu(found + t * found_step + Floats::size()));
  }
  for (int64_t k = 0; k < count; k++, right += right_step) {
    auto [first, second] = widened(right);
    Lanes a = lanes(first), b = lanes(second);
    UNROLLED for (int t = 0; t < T; t++) {
      low[t] += a * left[t * left_step + k];
      high[t] += b * left[t * left_step + k];
    }
  }
  UNROLLED for (int t = 0; t < T; t++) {
    std::memcpy(found + t * found_step, &low[t], sizeof(Lanes));
    std::memcpy(found + t * found_step + Floats::size(), &high[t], sizeof(Lanes));
  }
}

template <int T = TOKENS, typename... Arguments>
void multiply_few(int64_t rows, Arguments... arguments) {
  if constexpr (T > 1)
    if (rows < T) return multiply_few<T - 1>(rows, arguments...);
  multiply<T>(arguments...);
}

// `multiply` for any number of rows of `left`.
template <typename Number>
void multiply_all(int64_t rows, const float* left, int64_t left_step, const Number* right, int64_t right_step,
                  int64_t count, float* found, int64_t found_step, bool fresh) {
  for (int64_t row = 0; row < rows; row += TOKENS)
    multiply_few(std::min<int64_t>(TOKENS, rows - row), left + row * left_step, left_step, right, right_step, count,
                 found + row * found_step, found_step, fresh);
}

}  // namespace
