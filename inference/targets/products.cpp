// Products of a few tokens with 16-bit weights, for any processor that torch has vectors for. See products.py.
//
// A step waits for its weights to come from memory, and a processor's own guess ends at each row's end, so they are
// fetched ahead. Sums are float32 and of one order whatever the number of tokens: drafts change no bit.

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

using at::BFloat16;
using at::Half;
using Floats = at::vec::Vectorized<float>;
constexpr int64_t STEP = 2 * Floats::size();
constexpr int64_t AHEAD = 4096;  // weights
constexpr int64_t GROUP = 32;    // blocks of outputs that take turns over a block of tokens while that is in the cache
#ifdef CPU_CAPABILITY_AVX2
constexpr int OUTPUTS = 2, TOKENS = 4;  // as many sums at once as there are registers for
#else
constexpr int OUTPUTS = 4, TOKENS = 6;
#endif

std::tuple<Floats, Floats> widened(const Half* from) {
  return at::vec::convert_half_float(at::vec::Vectorized<Half>::loadu(from));
}

std::tuple<Floats, Floats> widened(const BFloat16* from) {
  return at::vec::convert_bfloat16_float(at::vec::Vectorized<BFloat16>::loadu(from));
}

template <typename State, typename Weight>
struct Product {
  const float* inputs;    // [tokens, size]
  const Weight* weights;  // [outputs, size]
  const float* bias;      // [outputs], or none
  State* found;           // [tokens, outputs]
  int64_t tokens, size, outputs;

  template <int T, int R, bool FIRST>
  void block(int64_t token, int64_t output) const {
    const float* x = inputs + token * size;
    const Weight* w = weights + output * size;
    Floats sums[T][R];
    for (int t = 0; t < T; t++)
      for (int r = 0; r < R; r++) sums[t][r] = Floats(0.f);
    int64_t whole = size / STEP * STEP;
    for (int64_t k = 0; k < whole; k += STEP) {
      Floats low[R], high[R];
      for (int r = 0; r < R; r++) {
        if (FIRST) __builtin_prefetch(w + r * size + k + AHEAD);
        std::tie(low[r], high[r]) = widened(w + r * size + k);
      }
      for (int t = 0; t < T; t++) {
        Floats a = Floats::loadu(x + t * size + k), b = Floats::loadu(x + t * size + k + Floats::size());
        for (int r = 0; r < R; r++)
          sums[t][r] = at::vec::fmadd(high[r], b, at::vec::fmadd(low[r], a, sums[t][r]));
      }
    }
    for (int t = 0; t < T; t++)
      for (int r = 0; r < R; r++) {
        float sum = at::vec::vec_reduce_all<float>([](Floats& a, Floats& b) { return a + b; }, sums[t][r]);
        for (int64_t k = whole; k < size; k++) sum += static_cast<float>(w[r * size + k]) * x[t * size + k];
        found[(token + t) * outputs + output + r] = static_cast<State>(bias ? sum + bias[output + r] : sum);
      }
  }

  template <int T, bool FIRST>
  void block_of(int64_t count, int64_t token, int64_t output) const {
    if constexpr (T > 1)
      if (count < T) return block_of<T - 1, FIRST>(count, token, output);
    if (output + OUTPUTS <= outputs) return block<T, OUTPUTS, FIRST>(token, output);
    for (; output < outputs; output++) block<T, 1, FIRST>(token, output);
  }

  void part(int64_t number, int64_t count) const {
    int64_t blocks = (outputs + OUTPUTS - 1) / OUTPUTS, end = blocks * (number + 1) / count;
    for (int64_t first = blocks * number / count; first < end; first += GROUP)
      for (int64_t token = 0; token < tokens; token += TOKENS)
        for (int64_t b = first; b < std::min(first + GROUP, end); b++)
          if (token == 0) block_of<TOKENS, true>(tokens, token, b * OUTPUTS);
          else block_of<TOKENS, false>(tokens - token, token, b * OUTPUTS);
  }

  void run() const {
#ifdef _OPENMP
#pragma omp parallel
    part(omp_get_thread_num(), omp_get_num_threads());
#else
    part(0, 1);
#endif
  }
};

}  // namespace

extern "C" {

#define FLOATS_TIMES(NAME, WEIGHT)                                                                                  \
  void NAME(const float* inputs, const WEIGHT* weights, const float* bias, float* found, int64_t tokens,            \
            int64_t size, int64_t outputs) {                                                                        \
    Product<float, WEIGHT>{inputs, weights, bias, found, tokens, size, outputs}.run();                              \
  }

FLOATS_TIMES(float32_float16, Half)
FLOATS_TIMES(float32_bfloat16, BFloat16)

void bfloat16_bfloat16(const BFloat16* inputs, const BFloat16* weights, const float* bias, BFloat16* found,
                       int64_t tokens, int64_t size, int64_t outputs) {
  std::vector<float> wide(inputs, inputs + tokens * size);
  Product<BFloat16, BFloat16>{wide.data(), weights, bias, found, tokens, size, outputs}.run();
}
}
