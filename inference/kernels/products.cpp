// Products of hidden states with weights in 32, 16 and 8 bits, for any processor that torch has vectors for, and of
// bfloat16 states with bfloat16 weights, for processors with tiles (AMX). See products.py.
//
// A step waits for its weights to come from memory, so they lie in the order in which they are read, and are asked for
// ahead of time. A sum has one order whatever the number of tokens, so drafts change no bit of it.

#ifdef __AMX_BF16__
#include <immintrin.h>
#endif

#include "vectors.h"

namespace {

constexpr int64_t AHEAD = 4096;  // weights

std::tuple<Floats, Floats> widened(const int8_t* from) {
#if defined(CPU_CAPABILITY_AVX512)
  auto half = [](const int8_t* it) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(it))));
  };
#elif defined(CPU_CAPABILITY_AVX2)
  auto half = [](const int8_t* it) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(it))));
  };
#else
  auto half = [](const int8_t* it) {
    float wide[Floats::size()];
    std::copy(it, it + Floats::size(), wide);
    return Floats::loadu(wide);
  };
#endif
  return {Floats(half(from)), Floats(half(from + Floats::size()))};
}

// What 8-bit numbers are multiplied with, or what is added to them: one for `shared` inputs each.
struct Scales {
  const void* numbers;  // [panels, size / shared, WIDTH], float16 or, if `wide`, float32
  bool wide;

  std::tuple<Floats, Floats> at(int64_t place) const {
    return wide ? widened(static_cast<const float*>(numbers) + place)
                : widened(static_cast<const Half*>(numbers) + place);
  }
};

template <typename Weight, typename Number = float>
struct Product {
  const float* inputs;    // [tokens, size]
  const Weight* weights;  // [panels, size, WIDTH]
  const float* bias;      // [outputs], or none
  Number* found;          // [tokens, outputs]
  int64_t tokens, size, outputs;
  int64_t shared = size;              // inputs of a block, which 8-bit weights have, as well as:
  Scales factors{}, offsets{};        // the latter may be none
  const float* block_sums = nullptr;  // of inputs, if there are offsets [tokens, size / shared]
  int64_t groups = (tokens + TOKENS - 1) / TOKENS;

  int64_t start(int64_t group) const { return tokens * group / groups; }

  // The outputs of a panel for T tokens, while weights that are wanted later begin to come.
  template <int T>
  void block(int64_t token, int64_t panel, const Weight* later, int64_t step) const {
    const float* x = inputs + token * size;
    const Weight* w = weights + panel * size * WIDTH;
    int64_t blocks = size / shared;
    Lanes low[T] = {}, high[T] = {};
    for (int64_t block = 0; block < blocks; block++) {
      Lanes first[T] = {}, second[T] = {};
      for (int64_t k = block * shared; k < (block + 1) * shared; k++, w += WIDTH, later += step) {
        __builtin_prefetch(later);
        auto [a, b] = widened(w);
        Lanes left = lanes(a), right = lanes(b);
        UNROLLED for (int t = 0; t < T; t++) {
          first[t] += left * x[t * size + k];
          second[t] += right * x[t * size + k];
        }
      }
      if constexpr (sizeof(Weight) == 1) {
        int64_t place = (panel * blocks + block) * WIDTH;
        auto [a, b] = factors.at(place);
        UNROLLED for (int t = 0; t < T; t++) {
          low[t] += first[t] * lanes(a);
          high[t] += second[t] * lanes(b);
        }
        if (!offsets.numbers) continue;
        auto [c, d] = offsets.at(place);
        UNROLLED for (int t = 0; t < T; t++) {
          low[t] += block_sums[(token + t) * blocks + block] * lanes(c);
          high[t] += block_sums[(token + t) * blocks + block] * lanes(d);
        }
      } else {
        std::copy(first, first + T, low);
        std::copy(second, second + T, high);
      }
    }
    int64_t column = panel * WIDTH, count = std::min(WIDTH, outputs - column);
    UNROLLED for (int t = 0; t < T; t++) {
      float sums[WIDTH];
      std::memcpy(sums, &low[t], sizeof(Lanes));
      std::memcpy(sums + Floats::size(), &high[t], sizeof(Lanes));
      Number* to = found + (token + t) * outputs + column;
      for (int64_t n = 0; n < count; n++) to[n] = bias ? sums[n] + bias[column + n] : sums[n];
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

template <typename Weight, typename Number>
void multiply(const Number* inputs, const Weight* weights, const float* bias, Number* found, int64_t tokens,
              int64_t size, int64_t outputs) {
  if constexpr (std::is_same_v<Number, float>) {
    Product<Weight>{inputs, weights, bias, found, tokens, size, outputs}.run();
  } else {
    static thread_local std::vector<float> wide;
    wide.resize(tokens * size);
    widen(inputs, tokens * size, wide.data(), tokens * size);
    Product<Weight, Number>{wide.data(), weights, bias, found, tokens, size, outputs}.run();
  }
}

#ifdef __AMX_BF16__

constexpr int64_t TILE = 16;   // rows of a tile; each has 64 bytes
constexpr int64_t BLOCK = 32;  // inputs, and outputs, of a block of weights

// Products of bfloat16 states and weights by the processor's tiles (AMX), up to two of states at once.
struct Tiles {
  const BFloat16* inputs;   // [tokens, size]
  const BFloat16* weights;  // [panels, size / 2, BLOCK, 2]
  const float* bias;        // [outputs], or none
  BFloat16* found;          // [tokens, outputs]
  int64_t tokens, size, outputs;

  // Tiles 0 to 3 hold sums, 4 and 5 the states of `first` and `second` tokens, 6 and 7 weights.
  static void configure(int64_t first, int64_t second) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, unused[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {};
    } tiles;
    const int64_t rows[] = {first, first, second, second, first, second, TILE, TILE};
    for (int i = 0; i < 8; i++) tiles.rows[i] = std::max<int64_t>(rows[i], 1);
    _tile_loadconfig(&tiles);
  }

  // The outputs of a panel for `first + second` tokens.
  void block(int64_t token, int64_t first, int64_t second, int64_t panel) const {
    const BFloat16* x = inputs + token * size;
    const BFloat16* w = weights + panel * size * BLOCK;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < size; k += BLOCK, w += BLOCK * BLOCK) {
      for (int64_t line = 0; line < BLOCK * BLOCK; line += 32) __builtin_prefetch(w + AHEAD + line);
      _tile_loadd(6, w, 128);
      _tile_loadd(7, w + 32, 128);
      _tile_loadd(4, x + k, 2 * size);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (second == 0) continue;
      _tile_loadd(5, x + TILE * size + k, 2 * size);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    alignas(64) float sums[2 * TILE][BLOCK];
    _tile_stored(0, sums[0], 4 * BLOCK);
    _tile_stored(1, sums[0] + 16, 4 * BLOCK);
    if (second > 0) {
      _tile_stored(2, sums[TILE], 4 * BLOCK);
      _tile_stored(3, sums[TILE] + 16, 4 * BLOCK);
    }
    int64_t column = panel * BLOCK, count = std::min(BLOCK, outputs - column);
    for (int64_t t = 0; t < first + second; t++) {
      BFloat16* to = found + (token + t) * outputs + column;
      for (int64_t n = 0; n < count; n++) to[n] = bias ? sums[t][n] + bias[column + n] : sums[t][n];
    }
  }

  // What one of several threads does. A panel stays in the processor's cache for all tokens.
  void part(int64_t number, int64_t count) const {
    int64_t panels = (outputs + BLOCK - 1) / BLOCK, configured = 0;
    for (int64_t panel = panels * number / count; panel < panels * (number + 1) / count; panel++)
      for (int64_t token = 0; token < tokens; token += 2 * TILE) {
        int64_t first = std::min(TILE, tokens - token), second = std::min(TILE, tokens - token - first);
        if (configured != first + second) configure(first, second);
        configured = first + second;
        block(token, first, second, panel);
      }
    _tile_release();
  }

  void run() const {
#pragma omp parallel
    part(omp_get_thread_num(), omp_get_num_threads());
  }
};

#endif

}  // namespace

extern "C" {

#ifdef __AMX_BF16__
void tiles(const BFloat16* inputs, const BFloat16* weights, const float* bias, BFloat16* found, int64_t tokens,
           int64_t size, int64_t outputs) {
  Tiles{inputs, weights, bias, found, tokens, size, outputs}.run();
}
#endif

int64_t width() { return WIDTH; }

#define PRODUCT(name, Weight, Number)                                                                            \
  void name(const Number* inputs, const Weight* weights, const float* bias, Number* found, int64_t tokens,       \
            int64_t size, int64_t outputs) {                                                                     \
    multiply(inputs, weights, bias, found, tokens, size, outputs);                                               \
  }

PRODUCT(float32, float, float)
PRODUCT(float16, Half, float)
PRODUCT(bfloat16, BFloat16, float)
PRODUCT(all_float16, Half, Half)
PRODUCT(all_bfloat16, BFloat16, BFloat16)

void int8(const float* inputs, const int8_t* weights, const float* bias, float* found, int64_t tokens, int64_t size,
          int64_t outputs, const void* factors, const void* offsets, int64_t shared, bool wide) {
  static thread_local std::vector<float> sums;
  sums.assign(offsets ? tokens * size / shared : 0, 0.f);
  for (size_t block = 0; block < sums.size(); block++)
    for (int64_t k = 0; k < shared; k++) sums[block] += inputs[block * shared + k];
  Product<int8_t>{inputs, weights,         bias,            found,      tokens, size, outputs,
                  shared, {factors, wide}, {offsets, wide}, sums.data()}
      .run();
}
}
