// Matrix products whose sums have one order, of weights as they lie in memory. See matmul.py.

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

}  // namespace

extern "C" {

void matmul_float32(const Shape* shape, const float* left, const float* right, float* found) {
  matmul(*shape, left, right, found);
}

void matmul_bfloat16(const Shape* shape, const BFloat16* left, const BFloat16* right, BFloat16* found) {
  matmul(*shape, left, right, found);
}

void matmul_float16(const Shape* shape, const Half* left, const Half* right, Half* found) {
  matmul(*shape, left, right, found);
}
}
