// The arguments of one matmul, and its implementations for the instruction sets of a machine.
#pragma once

#include <cstdint>
#include <cstring>

namespace octavo {

enum class ScaleType { kF32, kBF16, kF16, kE3M4, kE4M3, kE8M0 };

// y[M, N] = x[M, K] . w, with w as [K, N] ("columns") or as [N, K] ("rows").
struct FloatProblem {
  const float* x = nullptr;
  // For packed codes in rows: x with its even and its odd columns separated, each [M, (K + 1) / 2].
  const float* even = nullptr;
  const float* odd = nullptr;
  const uint8_t* codes = nullptr;
  const void* scale = nullptr;  // [groups, N] for columns, [N, groups] for rows
  ScaleType scale_type = ScaleType::kF32;
  // Of columns: zero points like the scales, or null, and with e3m4 scales the scale of each column's scales, or null
  // if `unit` is the scale of all.
  const float* outer = nullptr;
  float unit = 1.0f;
  const uint8_t* zero = nullptr;       // e3m4, with e3m4 scales
  const float* float_zero = nullptr;  // with other scales
  float* y = nullptr;
  int64_t m = 0, k = 0, n = 0;
  int64_t from = 0, until = 0;    // the part of K that is summed, an even number of values before it
  int64_t groups = 1, group = 0;  // groups of `group` values each along K
  bool packed = false;            // two 4-bit codes to a byte along K, the first in the low half
  float table[16] = {};           // the values of 4-bit codes
};

// Rows of int8 codes, with a scale for each `step` values along K, in place of floats; w is [K, N].
struct TiledProblem : FloatProblem {
  const int8_t* rows = nullptr;
  int64_t step = 0, steps = 0;
  const float* row_scale = nullptr;  // [M, steps]
  const int32_t* bias = nullptr;     // [M, steps]: what sums of products start with, as bytes of a panel are unsigned
  const float* shift = nullptr;      // [M, steps]: minus the sum of values of x, for zero points
};

struct IntProblem {
  const int32_t* pairs = nullptr;  // columns: [M, (K + 1) / 2], two int16 of x in each
  const int16_t* wide = nullptr;   // rows: [M, K]
  const int8_t* w = nullptr;
  int32_t* y = nullptr;
  int64_t m = 0, k = 0, n = 0;
};

// Attention of one new token in each row to the KV cache of its slot, for consecutive query heads. Rows of a slot are
// consecutive, and their keys and values are in the cache.
struct AttendProblem {
  const float* mixed = nullptr;  // [M, (heads + 2 * kv_heads) * dim]: queries, keys, values
  const int32_t* positions = nullptr;
  // Floats, or int8 codes with a scale for each head and position.
  void* keys = nullptr;         // [M / tokens, kv_heads, dim, time]
  void* values = nullptr;       // [M / tokens, kv_heads, time, dim]
  float* key_scale = nullptr;   // [M / tokens, kv_heads, time], or null for floats
  float* value_scale = nullptr;
  float* context = nullptr;  // [M, heads * dim]
  int64_t heads = 0, kv_heads = 0, dim = 0, time = 0;
  int64_t tokens = 1;  // new tokens of each slot
  int64_t limit = 0;   // positions from here on give NaN
};

constexpr int kMostAxes = 8;

// An axis of an array to be quantized; a stride of zero: all of its indices have the same scale, or factor.
struct QuantizeAxis {
  int64_t size, stride, scale_stride, factor_stride;
};

enum class CodeType { kInt8, kE4M3, kE5M2, kE2M1 };

// Random bits of a key, of which the upper 24 are noise in [0, 1), or the lower 8 or 16 with half a unit added.
struct NoiseKey {
  const uint32_t* words = nullptr;  // null for rounding to nearest
  int bits = 24;
};

// codes = round(x * factor / scale) with the scale absmax(x * factor) * unit of each group. The scale of a block format
// has eight bits and is a power of two, or in units of a scale of the tensor.
struct QuantizeProblem {
  const float* x = nullptr;
  const float* factor = nullptr;  // null for one
  CodeType type = CodeType::kInt8;
  uint8_t* codes = nullptr;  // two e2m1 to a byte, the first in the low half
  float* values = nullptr;   // where codes are decoded
  ScaleType scale_type = ScaleType::kF32;
  void* scale = nullptr;
  // Scratch, as many of each as groups. First the absmax, then the reciprocal of the scale.
  float* inverse = nullptr;
  float* attempts[2][3] = {};  // scale, its reciprocal and squared error of two candidates, or null
  float* sums[2] = {};         // of u * u and of u * code, where u are scaled values, or null
  float unit = 0, low = 0, high = 0;
  float range = 1;           // multiplies the absmax
  float outer = 1;           // the scale of the tensor
  bool up = false;           // whether scales are rounded up
  bool floor = false;        // whether powers of two are those below
  NoiseKey noise;
  int rank = 0, split = -1;  // split: the axis that is distributed over threads
  int64_t tile = 0;          // if not zero: of the last axis, whose values share a scale
  QuantizeAxis axes[kMostAxes];
};

// The most adjacent values that are rounded together.
constexpr int64_t kChunk = 256;

// What is done with the groups of an array: `values` from codes, or the others one after the other.
constexpr int kMeasuring = 1, kFinishing = 2, kRounding = 4, kDecoding = 8;

// One implementation. Matmuls compute the outputs of the columns (or rows of w) from `begin` to `end`, those of floats
// and columns for a part of K; `attend` computes the outputs of heads, numbered over all rows.
struct Version {
  const char* name;
  void (*float_columns)(const FloatProblem&, int64_t begin, int64_t end);
  void (*float_rows)(const FloatProblem&, int64_t begin, int64_t end);
  void (*int_columns)(const IntProblem&, int64_t begin, int64_t end);
  void (*int_rows)(const IntProblem&, int64_t begin, int64_t end);
  void (*tiled)(const TiledProblem&, int64_t begin, int64_t end);
  // y = x + the sum of `count` parts that are `stride` apart; x may be null
  void (*sum)(const float* x, const float* parts, int64_t count, int64_t stride, int64_t size, float* y);
  // y = x / sqrt(mean x^2 + epsilon) * scale
  void (*norm)(const float* x, const float* scale, float epsilon, int64_t size, float* y);
  // Rotates pairs (x_i, x_{i + half}) by angles, and multiplies them by a factor.
  void (*rotate)(float* x, const float* cos, const float* sin, float factor, int64_t half);
  // Stores the keys and values of a row in the cache, unless its position is beyond the limit.
  void (*keep)(const AttendProblem&, int64_t row);
  void (*attend)(const AttendProblem&, int64_t begin, int64_t end);
  // y = silu(gate) * up
  void (*gate)(const float* gate, const float* up, int64_t size, float* y);
  // Quantizes the groups of the indices from `begin` to `end` of the axis `split`, or does some part of it.
  void (*quantize)(const QuantizeProblem&, int work, int64_t begin, int64_t end);
  // Noise of the indices from `begin` to `end`.
  void (*noise)(const NoiseKey&, int64_t begin, int64_t end, float* y);
};

inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  uint32_t exponent = (h >> 10) & 31, fraction = h & 1023, bits;
  if (exponent == 31) {
    bits = 0x7f800000u | (fraction << 13);
  } else if (exponent != 0) {
    bits = ((exponent + 112) << 23) | (fraction << 13);
  } else if (fraction == 0) {
    bits = 0;
  } else {
    exponent = 113;
    while ((fraction & 1024) == 0) {
      fraction <<= 1;
      --exponent;
    }
    bits = (exponent << 23) | ((fraction & 1023) << 13);
  }
  bits |= sign;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// e3m4 has the bits of a float16 in other places: vectors of it hold 1/kE3M4Unit of the values, exactly, and of inf and
// NaN something of at least kE3M4Special.
inline uint16_t e3m4_to_half(uint8_t x) { return static_cast<uint16_t>(((x & 0x80) << 8) | ((x & 0x7f) << 6)); }
constexpr float kE3M4Unit = 4096.0f, kE3M4Special = 16.0f / kE3M4Unit;

inline float scale_at(const void* scale, ScaleType type, int64_t i) {
  if (type == ScaleType::kF32) return static_cast<const float*>(scale)[i];
  const uint16_t bits = static_cast<const uint16_t*>(scale)[i];
  if (type == ScaleType::kF16) return half_to_float(bits);
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Prefetches a line of w to the second-level cache. Prefetching to the small first level gave 12 GB/s on two cores of a
// Zen 4 instead of 21.
inline void fetch(const void* at) { __builtin_prefetch(at, 0, 2); }

// Rows of x from m0: rows beyond the last repeat it, and are not stored.
template <int MB, typename T>
inline void rows_of(const T* base, int64_t stride, int64_t m0, int64_t m, const T** rows) {
  for (int i = 0; i < MB; ++i) rows[i] = base + (m0 + i < m ? m0 + i : m - 1) * stride;
}

}  // namespace octavo
