// Products of float32 states with 16-bit weights, for any processor that torch has vectors for. See products.py.
//
// A step waits for its weights to come from memory, so they lie in the order in which they are read, and are asked for
// ahead of time. A sum has one order whatever the number of tokens, so drafts change no bit of it.

#include <ATen/cpu/vec/vec.h>
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <tuple>

namespace {

using at::BFloat16;
using at::Half;
using Floats = at::vec::Vectorized<float>;
constexpr int64_t WIDTH = 2 * Floats::size();  // outputs of a panel
constexpr int64_t AHEAD = 4096;                // weights
#ifdef CPU_CAPABILITY_AVX2
constexpr int TOKENS = 6;  // as many at once as there are registers for their sums
#else
constexpr int TOKENS = 12;
#endif

std::tuple<Floats, Floats> widened(const Half* from) {
  return at::vec::convert_half_float(at::vec::Vectorized<Half>::loadu(from));
}

std::tuple<Floats, Floats> widened(const BFloat16* from) {
  return at::vec::convert_bfloat16_float(at::vec::Vectorized<BFloat16>::loadu(from));
}

template <typename Weight>
struct Product {
  const float* inputs;    // [tokens, size]
  const Weight* weights;  // [panels, size, WIDTH]
  const float* bias;      // [outputs], or none
  float* found;           // [tokens, outputs]
  int64_t tokens, size, outputs;
  int64_t groups = (tokens + TOKENS - 1) / TOKENS;

  int64_t start(int64_t group) const { return tokens * group / groups; }

  // The outputs of a panel for T tokens, while weights that are wanted later begin to come.
  template <int T>
  void block(int64_t token, int64_t panel, const Weight* later, int64_t step) const {
    const float* x = inputs + token * size;
    const Weight* w = weights + panel * size * WIDTH;
    Floats low[T], high[T];
    for (int t = 0; t < T; t++) low[t] = high[t] = Floats(0.f);
    for (int64_t k = 0; k < size; k++, w += WIDTH, later += step) {
      __builtin_prefetch(later);
      auto [a, b] = widened(w);
      for (int t = 0; t < T; t++) {
        Floats state(x[t * size + k]);
        low[t] = at::vec::fmadd(a, state, low[t]);
        high[t] = at::vec::fmadd(b, state, high[t]);
      }
    }
    int64_t first = panel * WIDTH, count = std::min(WIDTH, outputs - first);
    for (int t = 0; t < T; t++) {
      float sums[WIDTH];
      low[t].store(sums);
      high[t].store(sums + Floats::size());
      float* to = found + (token + t) * outputs + first;
      for (int64_t n = 0; n < count; n++) to[n] = bias ? sums[n] + bias[first + n] : sums[n];
    }
  }

  template <int T>
  void block_of(int64_t count, int64_t token, int64_t panel, const Weight* later, int64_t step) const {
    if constexpr (T > 1)
      if (count < T) return block_of<T - 1>(count, token, panel, later, step);
    block<T>(token, panel, later, step);
  }

  // What one of several threads does. Groups of tokens that take turns share the time in which the next panel comes.
  void part(int64_t number, int64_t count) const {
    int64_t panels = (outputs + WIDTH - 1) / WIDTH, length = size * WIDTH;
    for (int64_t panel = panels * number / count; panel < panels * (number + 1) / count; panel++)
      for (int64_t group = 0; group < groups; group++) {
        int64_t ahead = groups == 1 ? AHEAD : length + length * group / groups;
        block_of<TOKENS>(start(group + 1) - start(group), start(group), panel, weights + panel * length + ahead,
                         WIDTH / groups);
      }
  }

  void run() const {
#pragma omp parallel
    part(omp_get_thread_num(), omp_get_num_threads());
  }
};

}  // namespace

extern "C" {

int64_t width() { return WIDTH; }

void float16(const float* inputs, const Half* weights, const float* bias, float* found, int64_t tokens, int64_t size,
             int64_t outputs) {
  Product<Half>{inputs, weights, bias, found, tokens, size, outputs}.run();
}

void bfloat16(const float* inputs, const BFloat16* weights, const float* bias, float* found, int64_t tokens,
              int64_t size, int64_t outputs) {
  Product<BFloat16>{inputs, weights, bias, found, tokens, size, outputs}.run();
}
}
