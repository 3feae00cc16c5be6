// Quantizing an array with the absmax of its groups, as an XLA custom call: validation, and the axis to distribute.

#include <memory>
#include <string>
#include <string_view>

#include "product.h"
#include "versions.h"

namespace octavo {
namespace {

// Each thread rounds as the caller does, which is XLA: with subnormal numbers as zeros or not.
struct RoundingMode {
#if defined(__x86_64__)
  unsigned mode = _mm_getcsr();
  void set() const { _mm_setcsr(mode); }
#else
  void set() const {}
#endif
};

ffi::Error quantize(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs factors,
                    ffi::Result<ffi::AnyBuffer> codes, ffi::Result<ffi::AnyBuffer> scale,
                    ffi::Span<const int64_t> sizes, ffi::Span<const int64_t> has_scale,
                    ffi::Span<const int64_t> has_factor, float unit, float low, float high, std::string_view isa,
                    int32_t threads) {
  if (x.element_type() != ffi::F32 || codes->element_type() != ffi::S8 || scale->element_type() != ffi::F32)
    return wrong("values and scales are float32, codes int8");
  const int64_t rank = sizes.size();
  if (rank < 1 || rank > kMostAxes || has_scale.size() != sizes.size() || has_factor.size() != sizes.size())
    return wrong("an array to be quantized has 1 to " + std::to_string(kMostAxes) + " axes");
  if (factors.size() > 1) return wrong("there is one factor at most");
  const Version* how = version(isa);
  if (how == nullptr) return wrong("this processor has no " + std::string(isa));
  QuantizeProblem p;
  p.rank = static_cast<int>(rank);
  int64_t values = 1, groups = 1, multipliers = 1;
  for (int d = p.rank - 1; d >= 0; --d) {
    const bool own = has_scale.begin()[d], multiplied = has_factor.begin()[d];
    p.axes[d] = {sizes.begin()[d], values, own ? groups : 0, multiplied ? multipliers : 0};
    values *= sizes.begin()[d];
    if (own) groups *= sizes.begin()[d];
    if (multiplied) multipliers *= sizes.begin()[d];
    // The first axis with scales, unless a later one has more of them and so work for more threads.
    if (own && (p.split < 0 || p.axes[d].size >= 64 || p.axes[d].size >= p.axes[p.split].size)) p.split = d;
  }
  if (p.split < 0) return wrong("there is an axis with scales");
  if (static_cast<int64_t>(x.element_count()) != values || static_cast<int64_t>(codes->element_count()) != values ||
      static_cast<int64_t>(scale->element_count()) != groups)
    return wrong("x " + text(x.dimensions()) + " and scale " + text(scale->dimensions()) + " do not fit the sizes");
  if (factors.size() == 1) {
    const auto factor = factors.get<ffi::AnyBuffer>(0);
    if (factor->element_type() != ffi::F32 || static_cast<int64_t>(factor->element_count()) != multipliers)
      return wrong("the factor " + text(factor->dimensions()) + " does not fit the sizes");
    p.factor = static_cast<const float*>(factor->untyped_data());
  }
  if (values == 0) return wrong("there is a value to quantize");
  p.x = static_cast<const float*>(x.untyped_data());
  p.codes = static_cast<int8_t*>(codes->untyped_data());
  p.scale = static_cast<float*>(scale->untyped_data());
  p.inverse = scratch(groups);
  p.unit = unit, p.low = low, p.high = high;
  const RoundingMode mode;
  const int64_t unit_size = p.split == p.rank - 1 ? 64 : 1;
  Team{pool, threads}.run(p.axes[p.split].size, unit_size, values * sizeof(float), [p, how, mode](int64_t a, int64_t b) {
    mode.set();
    how->quantize(p, a, b);
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
                                  .Attr<octavo::ffi::Span<const int64_t>>("sizes")
                                  .Attr<octavo::ffi::Span<const int64_t>>("has_scale")
                                  .Attr<octavo::ffi::Span<const int64_t>>("has_factor")
                                  .Attr<float>("unit")
                                  .Attr<float>("low")
                                  .Attr<float>("high")
                                  .Attr<std::string_view>("isa")
                                  .Attr<int32_t>("threads"));
