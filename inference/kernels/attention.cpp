// Attention over a cache whose sums have one order: see attention.py.
//
// A score is the sum over a key's numbers in their order; an output is the sum over the slots in their order. A hidden
// slot adds an exact zero, so neither padding, nor other rows, nor the branches of a tree change a bit of a text.
// Threads share rows, heads and queries, never the slots of one query.

#include <cmath>
#include <limits>

#include "vectors.h"

namespace {

constexpr int64_t SLOTS = 64;                  // slots whose values are read together
constexpr int64_t CACHED = 192 * 1024;         // scores of a block of queries, at most
constexpr int64_t QUERIES = 48;                // of a block, at most
constexpr int64_t STAGGER = 16;                // floats between rows, which then share no lines of the cache
constexpr int64_t WEIGHTS_STEP = SLOTS + STAGGER;
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

// A tensor [rows, heads, tokens, numbers]; the numbers of a token lie side by side.
template <typename Number>
struct View {
  const Number* data;
  const int64_t* steps;  // from a row, a head and a token to the next

  const Number* at(int64_t row, int64_t head, int64_t token) const {
    return data + row * steps[0] + head * steps[1] + token * steps[2];
  }
};

struct Sizes {
  int64_t rows, heads, key_heads, tokens, slots, size, value_size;
  int64_t query_steps[3], key_steps[3], value_steps[3], mask_steps[3];
  int64_t causal;  // without a mask: whether a token sees the tokens up to itself, and not all
};

struct Memory {
  std::vector<float> queries, scores, largest, weights, rows, tile, sums, totals;
};

template <typename Number, typename MaskNumber>
struct Attention {
  const Sizes& sizes;
  View<Number> query, keys, values;
  View<MaskNumber> mask;  // bools (true where a slot is visible) or numbers to be added; may be none
  const float* sinks;     // [heads]; may be none
  Number* found;          // [rows, tokens, heads, value_size]
  float scale, cap;       // the latter is 0 where scores have no cap
  int64_t group = sizes.heads / sizes.key_heads;
  int64_t key_size = padded_to(sizes.size, Floats::size()), sum_size = padded_to(sizes.value_size, WIDTH);

  static bool is_visible(MaskNumber number) {
    if constexpr (std::is_same_v<MaskNumber, bool>) return number;
    else return static_cast<float>(number) > static_cast<float>(std::numeric_limits<MaskNumber>::lowest()) / 2;
  }

  // The slots from the first to the last visible one.
  std::tuple<int64_t, int64_t> range(int64_t row, int64_t head, int64_t token) const {
    int64_t first = 0, end = sizes.slots;
    if (mask.data == nullptr) return {0, sizes.causal ? token + 1 : end};
    const MaskNumber* of = mask.at(row, head, token);
    while (end > 0 && !is_visible(of[end - 1])) end--;
    while (first < end && !is_visible(of[first])) first++;
    return {first, end};
  }

  // The mask of WIDTH slots, of which `visible` are left.
  static std::tuple<Floats, Floats> added(const MaskNumber* row, int64_t visible) {
    if constexpr (!std::is_same_v<MaskNumber, bool>)
      if (visible >= WIDTH && row != nullptr) return widened(row);
    float numbers[WIDTH];
    for (int64_t n = 0; n < WIDTH; n++) {
      if (n >= visible) numbers[n] = HIDDEN;
      else if (row == nullptr) numbers[n] = 0;
      else if constexpr (std::is_same_v<MaskNumber, bool>) numbers[n] = row[n] ? 0.f : HIDDEN;
      else numbers[n] = row[n];
    }
    return widened(numbers);
  }

  // Scales, caps and masks scores, of which `visible` are left, and puts the largest of each lane into `largest`.
  void finish(float* scores, int64_t count, const MaskNumber* mask_row, int64_t visible, float* largest) const {
    Floats most = Floats::loadu(largest);
    for (int64_t j = 0; j < count; j += WIDTH) {
      auto [low, high] = widened(scores + j);
      low = low * Floats(scale);
      high = high * Floats(scale);
      if (cap != 0) {
        low = Floats(cap) * (low / Floats(cap)).tanh();
        high = Floats(cap) * (high / Floats(cap)).tanh();
      }
      if (mask_row != nullptr || visible < j + WIDTH) {
        auto [first, second] = added(mask_row == nullptr ? nullptr : mask_row + j, visible - j);
        low = low + first;
        high = high + second;
      }
      low.store(scores + j);
      high.store(scores + j + Floats::size());
      most = at::vec::maximum(most, at::vec::maximum(low, high));
    }
    most.store(largest);
  }

  // The outputs of `count` of the queries that share a key head, from the `start`-th on; they are ordered by token.
  void block(int64_t row, int64_t key_head, int64_t start, int64_t count, Memory& memory) const {
    int64_t first = sizes.slots, end = 0;
    memory.queries.resize(count * key_size);
    for (int64_t q = 0; q < count; q++) {
      int64_t token = (start + q) / group, head = key_head * group + (start + q) % group;
      auto [from, to] = range(row, head, token);
      if (from < to) first = std::min(first, from);
      end = std::max(end, to);
      widen(query.at(row, head, token), sizes.size, memory.queries.data() + q * key_size, key_size);
    }
    first = std::min(first, end);
    int64_t slots = end - first, step = padded_to(slots, SLOTS) + STAGGER;
    memory.scores.resize(count * step);
    memory.rows.resize(WIDTH * key_size);
    memory.tile.resize(std::max(key_size * WIDTH, SLOTS * sum_size));
    memory.largest.assign(count * Floats::size(), HIDDEN);
    for (int64_t j = 0; j < slots; j += SLOTS) {
      float* scores = memory.scores.data() + j;
      for (int64_t k = j; k < std::min(slots, j + SLOTS); k += WIDTH) {
        transpose(keys.at(row, key_head, first + k), sizes.key_steps[2], std::min(WIDTH, slots - k), sizes.size,
                  memory.rows.data(), memory.tile.data());
        multiply_all(count, memory.queries.data(), key_size, memory.tile.data(), WIDTH, sizes.size,
                     memory.scores.data() + k, step, true);
      }
      int64_t several = padded_to(std::min(SLOTS, slots - j), WIDTH);
      for (int64_t q = 0; q < count; q++) {
        int64_t token = (start + q) / group, head = key_head * group + (start + q) % group;
        const MaskNumber* mask_row = mask.data == nullptr ? nullptr : mask.at(row, head, token) + first + j;
        int64_t visible = mask.data == nullptr && sizes.causal ? std::min(slots, token + 1) - j : slots - j;
        finish(scores + q * step, several, mask_row, visible, &memory.largest[q * Floats::size()]);
      }
    }
    memory.totals.resize(count);
    for (int64_t q = 0; q < count; q++) {
      float* each = &memory.largest[q * Floats::size()];
      int64_t head = key_head * group + (start + q) % group;
      float largest = std::max(*std::max_element(each, each + Floats::size()), sinks ? sinks[head] : HIDDEN);
      each[0] = largest == HIDDEN ? 0 : largest;
      memory.totals[q] = sinks ? std::exp(sinks[head] - each[0]) : 0.f;
    }
    memory.sums.assign(count * sum_size, 0.f);
    memory.weights.resize(count * WEIGHTS_STEP);
    bool direct = count <= TOKENS && sizes.value_size % WIDTH == 0;
    for (int64_t j = 0; j < slots; j += SLOTS) {
      int64_t several = std::min(SLOTS, slots - j);
      for (int64_t q = 0; q < count; q++) {
        Floats largest(memory.largest[q * Floats::size()]);
        for (int64_t n = 0; n < several; n += Floats::size())
          (Floats::loadu(&memory.scores[q * step + j + n]) - largest).exp_u20().store(&memory.weights[q * WEIGHTS_STEP + n]);
      }
      for (int64_t q = 0; q < count; q += TOKENS)
        add_up(&memory.weights[q * WEIGHTS_STEP], several, std::min<int64_t>(TOKENS, count - q), &memory.totals[q]);
      for (int64_t n = 0; n < several && !direct; n++)
        widen(values.at(row, key_head, first + j + n), sizes.value_size, &memory.tile[n * sum_size], sum_size);
      for (int64_t d = 0; d < sum_size; d += WIDTH)
        if (direct)
          multiply_all(count, memory.weights.data(), WEIGHTS_STEP, values.at(row, key_head, first + j) + d,
                       sizes.value_steps[2], several, &memory.sums[d], sum_size, false);
        else
          multiply_all(count, memory.weights.data(), WEIGHTS_STEP, &memory.tile[d], sum_size, several, &memory.sums[d],
                       sum_size, false);
    }
    for (int64_t q = 0; q < count; q++) {
      int64_t token = (start + q) / group, head = key_head * group + (start + q) % group;
      Number* to = found + ((row * sizes.tokens + token) * sizes.heads + head) * sizes.value_size;
      float total = memory.totals[q] > 0 ? memory.totals[q] : 1.f;
      for (int64_t d = 0; d < sizes.value_size; d++) to[d] = memory.sums[q * sum_size + d] / total;
    }
  }

  // Adds the numbers of each row to its total, in their order: several sums at once, as each waits for its last addition.
  static void add_up(const float* numbers, int64_t count, int64_t rows, float* totals) {
    float sums[TOKENS] = {};
    const float* row[TOKENS];
    for (int64_t n = 0; n < TOKENS; n++) row[n] = numbers + std::min(n, rows - 1) * WEIGHTS_STEP;
    for (int64_t n = 0; n < rows; n++) sums[n] = totals[n];
    for (int64_t k = 0; k < count; k++)
      for (int n = 0; n < TOKENS; n++) sums[n] += row[n][k];
    std::copy(sums, sums + rows, totals);
  }

  void run() const {
    int64_t queries = sizes.tokens * group, pairs = sizes.rows * sizes.key_heads;
    int64_t most = std::clamp(CACHED / sizes.slots / TOKENS * TOKENS, int64_t(TOKENS), QUERIES);
    int64_t wanted = (omp_get_max_threads() + pairs - 1) / pairs;  // blocks of a pair, for each thread to have one
    int64_t blocks = std::min(queries, std::max(wanted, (queries + most - 1) / most));
#pragma omp parallel if (pairs * queries * sizes.slots * sizes.size > 1 << 16)
    {
      static thread_local Memory memory;
#pragma omp for schedule(dynamic)
      for (int64_t unit = pairs * blocks - 1; unit >= 0; unit--) {  // the later queries of a text take longer
        int64_t pair = unit % pairs, number = unit / pairs;
        int64_t start = queries * number / blocks, end = queries * (number + 1) / blocks;
        block(pair / sizes.key_heads, pair % sizes.key_heads, start, end - start, memory);
      }
    }
  }
};

template <typename Number>
void attend(const Sizes& sizes, const Number* query, const Number* keys, const Number* values, const void* mask,
            bool is_bool, const float* sinks, Number* found, float scale, float cap) {
  View<Number> queries{query, sizes.query_steps}, all_keys{keys, sizes.key_steps}, all_values{values, sizes.value_steps};
  if (is_bool)
    Attention<Number, bool>{sizes, queries, all_keys, all_values, {static_cast<const bool*>(mask), sizes.mask_steps},
                            sinks, found, scale, cap}.run();
  else
    Attention<Number, Number>{sizes, queries, all_keys, all_values, {static_cast<const Number*>(mask), sizes.mask_steps},
                              sinks, found, scale, cap}.run();
}

}  // namespace

extern "C" {

#define ATTEND(name, Number)                                                                                      \
  void name(const Sizes* sizes, const Number* query, const Number* keys, const Number* values, const void* mask, \
            bool is_bool, const float* sinks, Number* found, float scale, float cap) {                           \
    attend(*sizes, query, keys, values, mask, is_bool, sinks, found, scale, cap);                                \
  }

ATTEND(attend_float32, float)
ATTEND(attend_bfloat16, BFloat16)
ATTEND(attend_float16, Half)
}
