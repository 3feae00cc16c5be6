// Validation of the custom calls' operands. Every size is read from the buffers themselves.
#pragma once

#include <string>

#include "problem.h"
#include "xla/ffi/api/ffi.h"

namespace octavo {

namespace ffi = xla::ffi;

inline ffi::Error wrong(const std::string& what) { return ffi::Error::InvalidArgument("octavo: " + what); }

inline std::string text(ffi::AnyBuffer::Dimensions dims) {
  std::string out = "[";
  for (size_t i = 0; i < dims.size(); ++i) out += (i ? ", " : "") + std::to_string(dims[i]);
  return out + "]";
}

inline bool is_matrix(const ffi::AnyBuffer& b) { return b.dimensions().size() == 2; }

// Fills in a matrix for p.m rows of p.k values. Codes are int8, or two to a byte in uint8 with a table of 16 values.
inline ffi::Error take_matrix(const ffi::AnyBuffer& codes, const ffi::AnyBuffer& scale, const float* table,
                              bool transposed, FloatProblem& p) {
  if (!is_matrix(codes) || !is_matrix(scale)) return wrong("operands are matrices");
  if (codes.element_type() != ffi::S8 && codes.element_type() != ffi::U8)
    return wrong("8-bit codes are int8, packed ones uint8");
  p.packed = codes.element_type() == ffi::U8;
  const int64_t stored = p.packed ? (p.k + 1) / 2 : p.k;
  p.n = codes.dimensions()[transposed ? 0 : 1];
  p.groups = scale.dimensions()[transposed ? 1 : 0];
  if (codes.dimensions()[transposed ? 1 : 0] != stored)
    return wrong("x [" + std::to_string(p.m) + ", " + std::to_string(p.k) + "] does not fit codes " +
                 text(codes.dimensions()));
  if (scale.dimensions()[transposed ? 0 : 1] != p.n || p.groups < 1 || p.k % p.groups != 0)
    return wrong("scale " + text(scale.dimensions()) + " does not fit codes " + text(codes.dimensions()));
  p.group = p.k / p.groups;
  if (p.packed && p.groups > 1 && p.group % 2 != 0) return wrong("groups of packed codes are even");
  switch (scale.element_type()) {
    case ffi::F32: p.scale_type = ScaleType::kF32; break;
    case ffi::BF16: p.scale_type = ScaleType::kBF16; break;
    case ffi::F16: p.scale_type = ScaleType::kF16; break;
    case ffi::F8E3M4: p.scale_type = ScaleType::kE3M4; break;
    default: return wrong("scales are float32, bfloat16 or float16, or float8_e3m4");
  }
  p.codes = static_cast<const uint8_t*>(codes.untyped_data());
  p.scale = scale.untyped_data();
  if (p.packed) std::memcpy(p.table, table, sizeof p.table);
  if (p.scale_type == ScaleType::kE3M4 && transposed) return wrong("e3m4 scales are for matrices [K, N]");
  return ffi::Error::Success();
}

// Adds zero points, float32 or with e3m4 scales e3m4, and the scale of all scales or of each column's to a matrix; empty
// buffers are none.
inline ffi::Error take_levels(const ffi::AnyBuffer& zero, const ffi::AnyBuffer& outer, FloatProblem& p) {
  if (p.scale_type != ScaleType::kE3M4) {
    if (outer.element_count()) return wrong("only e3m4 scales have two levels");
    if (zero.element_count() == 0) return ffi::Error::Success();
    if (zero.element_type() != ffi::F32 || static_cast<int64_t>(zero.element_count()) != p.groups * p.n)
      return wrong("there is a float32 zero point for each scale");
    p.float_zero = static_cast<const float*>(zero.untyped_data());
    return ffi::Error::Success();
  }
  if (zero.element_count() != 0) {
    if (zero.element_type() != ffi::F8E3M4 || static_cast<int64_t>(zero.element_count()) != p.groups * p.n)
      return wrong("there is an e3m4 zero point for each scale");
    p.zero = static_cast<const uint8_t*>(zero.untyped_data());
  }
  if (outer.element_count() != 0) {
    const int64_t count = static_cast<int64_t>(outer.element_count());
    if (outer.element_type() != ffi::F32 || (count != 1 && count != p.n))
      return wrong("there is a float32 scale for each column, or one for all");
    const float* scale = static_cast<const float*>(outer.untyped_data());
    if (count == 1) {
      p.unit = *scale;
    } else {
      p.outer = scale;
    }
  }
  return ffi::Error::Success();
}

}  // namespace octavo
