// Quantizing an array with the absmax of its groups, as an XLA custom call: validation, and the axis to distribute.

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "product.h"
#include "versions.h"

namespace octavo {
namespace {

using Sizes = ffi::Span<const int64_t>;

// Each thread rounds as the caller does, which is XLA: with subnormal numbers as zeros or not.
struct RoundingMode {
#if defined(__x86_64__)
  unsigned mode = _mm_getcsr();
  void set() const { _mm_setcsr(mode); }
#else
  void set() const {}
#endif
};

bool find(ffi::DataType type, CodeType* found) {
  switch (type) {
    case ffi::S8: *found = CodeType::kInt8; return true;
    case ffi::F8E4M3FN: *found = CodeType::kE4M3; return true;
    case ffi::F8E5M2: *found = CodeType::kE5M2; return true;
    case ffi::F4E2M1FN: *found = CodeType::kE2M1; return true;
    default: return false;
  }
}

bool find(ffi::DataType type, ScaleType* found) {
  switch (type) {
    case ffi::F32: *found = ScaleType::kF32; return true;
    case ffi::F8E4M3FN: *found = ScaleType::kE4M3; return true;
    case ffi::F8E8M0FNU: *found = ScaleType::kE8M0; return true;
    default: return false;
  }
}

bool is_floats(const ffi::AnyBuffer& b, int64_t count) {
  return b.element_type() == ffi::F32 && static_cast<int64_t>(b.element_count()) == count;
}

// How many values, groups and factors there are.
struct Counts {
  int64_t values = 1, groups = 1, factors = 1;
};

// Fills in the axes, and which of them is distributed.
ffi::Error take_axes(Sizes sizes, Sizes has_scale, Sizes has_factor, QuantizeProblem& p, Counts& n) {
  const int64_t rank = sizes.size();
  if (rank < 1 || rank > kMostAxes || has_scale.size() != sizes.size() || has_factor.size() != sizes.size())
    return wrong("an array to be quantized has 1 to " + std::to_string(kMostAxes) + " axes");
  p.rank = static_cast<int>(rank);
  for (int d = p.rank - 1; d >= 0; --d) {
    const bool own = has_scale.begin()[d], multiplied = has_factor.begin()[d];
    p.axes[d] = {sizes.begin()[d], n.values, own ? n.groups : 0, multiplied ? n.factors : 0};
    n.values *= sizes.begin()[d];
    if (own) n.groups *= sizes.begin()[d];
    if (multiplied) n.factors *= sizes.begin()[d];
    // The first axis with scales, unless a later one has more of them and so work for more threads.
    if (own && (p.split < 0 || p.axes[d].size >= 64 || p.axes[d].size >= p.axes[p.split].size)) p.split = d;
  }
  if (p.split < 0) return wrong("there is an axis with scales");
  if (n.values == 0) return wrong("there is a value to quantize");
  const QuantizeAxis& last = p.axes[p.rank - 1];
  const bool tiles = p.rank > 1 && last.scale_stride == 0 && p.axes[p.rank - 2].scale_stride != 0;
  if (tiles && (last.size == 16 || last.size == 32)) p.tile = last.size;
  if (p.type == CodeType::kE2M1 && last.size % 2 != 0) return wrong("two codes of four bits are one byte");
  return ffi::Error::Success();
}

// Runs some of the work on all threads.
void run(const QuantizeProblem& p, const Version* how, Team team, int64_t values, int work) {
  const RoundingMode mode;
  const int64_t unit_size = p.split == p.rank - 1 ? 64 : (p.tile != 0 && p.split == p.rank - 2 ? kChunk / p.tile : 1);
  team.run(p.axes[p.split].size, unit_size, values * sizeof(float), [p, how, mode, work](int64_t a, int64_t b) {
    mode.set();
    how->quantize(p, work, a, b);
  });
}

// The scale of the tensor that brings the largest finite absmax to the largest scale of a block.
float outer_scale(const QuantizeProblem& p, int64_t groups, float headroom, float unit) {
  constexpr float kTiny = 1.17549435e-38f;
  float largest = 0;
  for (int64_t i = 0; i < groups; ++i) {
    const float absmax = p.range == 1.0f ? p.inverse[i] : p.inverse[i] * p.range;
    largest = std::isfinite(absmax) && absmax > largest ? absmax : largest;
  }
  largest = headroom == 1.0f ? largest : headroom * largest;
  return largest == 0.0f ? 1.0f : std::max(largest * unit, kTiny);
}

// One scale from the absmax of all groups.
void share_scale(const QuantizeProblem& p, const Version* how, int64_t groups) {
  int32_t top = 0;
  for (int64_t i = 0; i < groups; ++i) {
    int32_t bits;
    std::memcpy(&bits, p.inverse + i, sizeof bits);
    top = std::max(top, bits);
  }
  std::memcpy(p.inverse, &top, sizeof top);
  QuantizeProblem one = p;
  one.rank = 1, one.split = 0, one.tile = 0, one.axes[0] = {1, 1, 1, 0};
  how->quantize(one, kFinishing, 0, 1);
  std::fill(p.inverse + 1, p.inverse + groups, p.inverse[0]);
}

ffi::Error quantize(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs more, ffi::Result<ffi::AnyBuffer> codes,
                    ffi::Result<ffi::AnyBuffer> scale, ffi::RemainingRets rets, Sizes sizes, Sizes has_scale,
                    Sizes has_factor, float unit, float low, float high, float range, float headroom, float outer_unit,
                    std::string_view mode, int32_t noise_bits, std::string_view isa, int32_t threads) {
  QuantizeProblem p;
  if (x.element_type() != ffi::F32 || !find(codes->element_type(), &p.type) ||
      !find(scale->element_type(), &p.scale_type))
    return wrong("values are float32, codes int8, float8 or float4, and scales float32, e8m0 or e4m3");
  const Version* how = version(isa);
  if (how == nullptr) return wrong("this processor has no " + std::string(isa));
  Counts n;
  if (ffi::Error error = take_axes(sizes, has_scale, has_factor, p, n); error.failure()) return error;
  const bool tensor = mode == "tensor", tries = mode == "four_over_six", sums = mode == "sums";
  const bool outer = p.scale_type == ScaleType::kE4M3;
  if (static_cast<int64_t>(x.element_count()) != n.values || static_cast<int64_t>(codes->element_count()) != n.values ||
      static_cast<int64_t>(scale->element_count()) != (tensor ? 1 : n.groups))
    return wrong("x " + text(x.dimensions()) + " and scale " + text(scale->dimensions()) + " do not fit the sizes");
  const size_t keys = noise_bits == 0 ? 0 : 1;
  if (more.size() < keys || more.size() > keys + 1) return wrong("there is one factor at most, and a key for noise");
  if (more.size() == keys + 1) {
    const auto factor = more.get<ffi::AnyBuffer>(0);
    if (!is_floats(*factor, n.factors)) return wrong("the factor " + text(factor->dimensions()) + " does not fit the sizes");
    p.factor = static_cast<const float*>(factor->untyped_data());
    p.tile = 0;
  }
  if (keys == 1) {
    const auto key = more.get<ffi::AnyBuffer>(more.size() - 1);
    if (key->element_type() != ffi::U32 || key->element_count() != 2) return wrong("a key is two words");
    p.noise = {static_cast<const uint32_t*>(key->untyped_data()), noise_bits};
  }
  const size_t wanted = (outer ? 1 : 0) + (sums ? 2 : 0);
  if (rets.size() != wanted) return wrong("there are " + std::to_string(wanted) + " further results");
  if ((tensor && p.scale_type != ScaleType::kF32) || ((tries || sums) && !(outer && p.type == CodeType::kE2M1)))
    return wrong("there is no mode " + std::string(mode) + " of these types");
  p.x = static_cast<const float*>(x.untyped_data());
  p.codes = static_cast<uint8_t*>(codes->untyped_data());
  p.scale = scale->untyped_data();
  p.inverse = scratch(n.groups * (tries ? 7 : 1));
  for (int i = 0; i < 6 && tries; ++i) p.attempts[i / 3][i % 3] = p.inverse + (i + 1) * n.groups;
  for (size_t i = 0; i < 2 && sums; ++i) {
    const auto result = rets.get<ffi::AnyBuffer>(i + 1);
    if (!is_floats(**result, n.groups)) return wrong("there is a sum for each scale");
    p.sums[i] = static_cast<float*>((*result)->untyped_data());
  }
  p.unit = unit, p.low = low, p.high = high, p.range = range;
  p.up = noise_bits != 0, p.floor = mode == "floor";
  const Team team{pool, threads};
  if (!outer && !tensor) {
    run(p, how, team, n.values, kMeasuring | kFinishing | kRounding);
    return ffi::Error::Success();
  }
  run(p, how, team, n.values, kMeasuring);
  if (tensor) {
    share_scale(p, how, n.groups);
  } else {
    const auto result = rets.get<ffi::AnyBuffer>(0);
    if (!is_floats(**result, 1)) return wrong("the tensor has one scale");
    p.outer = outer_scale(p, n.groups, headroom, outer_unit);
    *static_cast<float*>((*result)->untyped_data()) = p.outer;
  }
  run(p, how, team, n.values, tensor ? kRounding : kFinishing | kRounding);
  return ffi::Error::Success();
}

// Float32 values of e2m1 codes with their scales.
ffi::Error dequantize(ffi::ThreadPool pool, ffi::AnyBuffer codes, ffi::AnyBuffer scale, ffi::RemainingArgs outer,
                      ffi::Result<ffi::AnyBuffer> values, Sizes sizes, Sizes has_scale, Sizes has_factor,
                      std::string_view isa, int32_t threads) {
  QuantizeProblem p;
  if (codes.element_type() != ffi::F4E2M1FN || !find(scale.element_type(), &p.scale_type) ||
      p.scale_type == ScaleType::kF32 || values->element_type() != ffi::F32)
    return wrong("codes are float4, their scales e8m0 or e4m3, and values float32");
  const Version* how = version(isa);
  if (how == nullptr) return wrong("this processor has no " + std::string(isa));
  p.type = CodeType::kE2M1;
  Counts n;
  if (ffi::Error error = take_axes(sizes, has_scale, has_factor, p, n); error.failure()) return error;
  if (static_cast<int64_t>(codes.element_count()) != n.values ||
      static_cast<int64_t>(values->element_count()) != n.values ||
      static_cast<int64_t>(scale.element_count()) != n.groups || outer.size() > 1)
    return wrong("codes " + text(codes.dimensions()) + " and scale " + text(scale.dimensions()) + " do not fit the sizes");
  if (outer.size() == 1) {
    const auto given = outer.get<ffi::AnyBuffer>(0);
    if (!is_floats(*given, 1)) return wrong("the tensor has one scale");
    p.outer = *static_cast<const float*>(given->untyped_data());
  }
  p.codes = static_cast<uint8_t*>(codes.untyped_data());
  p.scale = scale.untyped_data();
  p.values = static_cast<float*>(values->untyped_data());
  p.inverse = scratch(n.groups);
  run(p, how, Team{pool, threads}, n.values, kDecoding);
  return ffi::Error::Success();
}

// The noise of stochastic rounding: `octavo.numerics.Stochastic.noise`.
ffi::Error noise(ffi::ThreadPool pool, ffi::AnyBuffer key, ffi::Result<ffi::AnyBuffer> out, int32_t bits,
                 std::string_view isa, int32_t threads) {
  if (key.element_type() != ffi::U32 || key.element_count() != 2 || out->element_type() != ffi::F32)
    return wrong("a key is two words, and noise is float32");
  const Version* how = version(isa);
  if (how == nullptr) return wrong("this processor has no " + std::string(isa));
  const NoiseKey from{static_cast<const uint32_t*>(key.untyped_data()), bits};
  float* y = static_cast<float*>(out->untyped_data());
  const int64_t size = out->element_count();
  Team{pool, threads}.run(size, 1024, size * static_cast<int64_t>(sizeof(float)), [=](int64_t begin, int64_t end) {
    how->noise(from, begin, end, y + begin);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace octavo

XLA_FFI_DEFINE_HANDLER_SYMBOL(octavo_quantize, octavo::quantize,
                              octavo::ffi::Ffi::Bind()
                                  .Ctx<octavo::ffi::ThreadPool>()
                                  .Arg<octavo::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<octavo::ffi::AnyBuffer>()
                                  .Ret<octavo::ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<octavo::ffi::Span<const int64_t>>("sizes")
                                  .Attr<octavo::ffi::Span<const int64_t>>("has_scale")
                                  .Attr<octavo::ffi::Span<const int64_t>>("has_factor")
                                  .Attr<float>("unit")
                                  .Attr<float>("low")
                                  .Attr<float>("high")
                                  .Attr<float>("range")
                                  .Attr<float>("headroom")
                                  .Attr<float>("outer_unit")
                                  .Attr<std::string_view>("mode")
                                  .Attr<int32_t>("noise_bits")
                                  .Attr<std::string_view>("isa")
                                  .Attr<int32_t>("threads"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(octavo_dequantize, octavo::dequantize,
                              octavo::ffi::Ffi::Bind()
                                  .Ctx<octavo::ffi::ThreadPool>()
                                  .Arg<octavo::ffi::AnyBuffer>()
                                  .Arg<octavo::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<octavo::ffi::AnyBuffer>()
                                  .Attr<octavo::ffi::Span<const int64_t>>("sizes")
                                  .Attr<octavo::ffi::Span<const int64_t>>("has_scale")
                                  .Attr<octavo::ffi::Span<const int64_t>>("has_factor")
                                  .Attr<std::string_view>("isa")
                                  .Attr<int32_t>("threads"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(octavo_noise, octavo::noise,
                              octavo::ffi::Ffi::Bind()
                                  .Ctx<octavo::ffi::ThreadPool>()
                                  .Arg<octavo::ffi::AnyBuffer>()
                                  .Ret<octavo::ffi::AnyBuffer>()
                                  .Attr<int32_t>("bits")
                                  .Attr<std::string_view>("isa")
                                  .Attr<int32_t>("threads"));
