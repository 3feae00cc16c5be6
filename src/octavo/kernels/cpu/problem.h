// What one product is made of, and the versions of it that a machine may choose from.
#pragma once

#include <cstdint>
#include <cstring>

namespace octavo {

enum class ScaleType { kF32, kBF16, kF16 };

// y[M, N] = x[M, K] . w, with w as [K, N] ("columns") or as [N, K] ("rows").
struct FloatProblem {
  const float* x = nullptr;
  // For packed codes in rows: x with its even and its odd places apart, each [M, (K + 1) / 2].
  const float* even = nullptr;
  const float* odd = nullptr;
  const uint8_t* codes = nullptr;
  const void* scale = nullptr;  // [groups, N] for columns, [N, groups] for rows
  ScaleType scale_type = ScaleType::kF32;
  float* y = nullptr;
  int64_t m = 0, k = 0, n = 0;
  int64_t groups = 1, group = 0;  // groups of `group` values each along K
  bool packed = false;            // two 4-bit codes to a byte along K, the first in the low half
  float table[16] = {};           // what 4-bit codes stand for
};

struct IntProblem {
  const int32_t* pairs = nullptr;  // columns: [M, (K + 1) / 2], two int16 of x in each
  const int16_t* wide = nullptr;   // rows: [M, K]
  const int8_t* w = nullptr;
  int32_t* y = nullptr;
  int64_t m = 0, k = 0, n = 0;
};

// One version: each function computes the outputs of the columns (or rows of w) from `begin` to `end`.
struct Version {
  const char* name;
  void (*float_columns)(const FloatProblem&, int64_t begin, int64_t end);
  void (*float_rows)(const FloatProblem&, int64_t begin, int64_t end);
  void (*int_columns)(const IntProblem&, int64_t begin, int64_t end);
  void (*int_rows)(const IntProblem&, int64_t begin, int64_t end);
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

inline float scale_at(const void* scale, ScaleType type, int64_t i) {
  if (type == ScaleType::kF32) return static_cast<const float*>(scale)[i];
  const uint16_t bits = static_cast<const uint16_t*>(scale)[i];
  if (type == ScaleType::kF16) return half_to_float(bits);
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Has a line of w on its way to the second-level cache. Two blocks ahead and no nearer to the registers is where
// memory gives all it has: 21 GB/s on two cores of a Zen 4, against 12 one block ahead into the first level.
inline void fetch(const void* at) { __builtin_prefetch(at, 0, 2); }

// Rows of x from m0: rows beyond the last repeat it, and are not stored.
template <int MB, typename T>
inline void rows_of(const T* base, int64_t stride, int64_t m0, int64_t m, const T** rows) {
  for (int i = 0; i < MB; ++i) rows[i] = base + (m0 + i < m ? m0 + i : m - 1) * stride;
}

}  // namespace octavo
