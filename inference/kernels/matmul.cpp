// Matrix products of weights as they lie in memory (see matmul.py), and RMS norms, whose sums have one order.

#include <cmath>

#include "vectors.h"

namespace {

constexpr int64_t TILE = 256;  // inputs whose weights are read together

struct Shape {
  int64_t batch, rows, size, columns;
  int64_t batch_step, input_step, column_step;  // of the right matrix; one of the last two is 1
};

template <typename Number>
void multiply_columns(const Shape& shape, const float* left, const Number* right, int64_t batch, int64_t column,
                      Number* found) {
  static thread_local std::vector<float> lines, tile, sums;
  lines.resize(WIDTH * TILE);
  tile.resize(WIDTH * TILE);
  sums.resize(shape.rows * WIDTH);
  int64_t count = std::min(WIDTH, shape.columns - column);
  left += batch * shape.rows * shape.size;
  right += batch * shape.batch_step + column * shape.column_step;
  for (int64_t k = 0; k < shape.size; k += TILE) {
    int64_t several = std::min(TILE, shape.size - k);
    const Number* from = right + k * shape.input_step;
    if (shape.column_step == 1)
      for (int64_t n = 0; n < several; n++) widen(from + n * shape.input_step, count, &tile[n * WIDTH], WIDTH);
    else
      transpose(from, shape.column_step, count, several, lines.data(), tile.data());
    multiply_all(shape.rows, left + k, shape.size, tile.data(), WIDTH, several, sums.data(), WIDTH, k == 0);
  }
  for (int64_t row = 0; row < shape.rows; row++)
    for (int64_t n = 0; n < count; n++)
      found[(batch * shape.rows + row) * shape.columns + column + n] = sums[row * WIDTH + n];
}

template <typename Number>
void matmul(const Shape& shape, const Number* left, const Number* right, Number* found) {
  static thread_local std::vector<float> wide;
  int64_t numbers = shape.batch * shape.rows * shape.size, blocks = (shape.columns + WIDTH - 1) / WIDTH;
  wide.resize(numbers);
  widen(left, numbers, wide.data(), numbers);
  const float* inputs = wide.data();
#pragma omp parallel for schedule(static) if (numbers * shape.columns > 1 << 16)
  for (int64_t unit = 0; unit < shape.batch * blocks; unit++)
    multiply_columns(shape, inputs, right, unit / blocks, unit % blocks * WIDTH, found);
}

// weight * (x / sqrt(mean(x^2) + epsilon)), rounded before the weight is applied; the sum has an order of its own.
template <typename Number>
void normalize(const Number* inputs, const Number* weight, Number* found, int64_t rows, int64_t size, float epsilon) {
  static thread_local std::vector<float> numbers;
  int64_t padded = padded_to(size, WIDTH);
  numbers.resize(padded);
  for (int64_t row = 0; row < rows; row++, inputs += size, found += size) {
    widen(inputs, size, numbers.data(), padded);
    Lanes low{}, high{};
    for (int64_t n = 0; n < padded; n += WIDTH) {
      Lanes first = lanes(Floats::loadu(&numbers[n])), second = lanes(Floats::loadu(&numbers[n + Floats::size()]));
      low += first * first;
      high += second * second;
    }
    low += high;
    float sum = 0;
    for (int64_t n = 0; n < Floats::size(); n++) sum += low[n];
    float factor = 1 / std::sqrt(sum / size + epsilon);
    for (int64_t n = 0; n < size; n++)
      found[n] = static_cast<float>(weight[n]) * static_cast<float>(static_cast<Number>(numbers[n] * factor));
  }
}

}  // namespace

extern "C" {

#define KERNELS(number, Number)                                                                                      \
  void matmul_##number(const Shape* shape, const Number* left, const Number* right, Number* found) {                 \
    matmul(*shape, left, right, found);                                                                              \
  }                                                                                                                  \
  void normalize_##number(const Number* inputs, const Number* weight, Number* found, int64_t rows, int64_t size,     \
                          float epsilon) {                                                                           \
    normalize(inputs, weight, found, rows, size, epsilon);                                                           \
  }

KERNELS(float32, float)
KERNELS(bfloat16, BFloat16)
KERNELS(float16, Half)
}
