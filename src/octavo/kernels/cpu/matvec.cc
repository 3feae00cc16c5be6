// Matmuls of a few rows and a quantized matrix, as XLA custom calls: validation, and the choice of instruction set.

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "checks.h"
#include "product.h"
#include "threads.h"
#include "versions.h"

namespace ffi = xla::ffi;

namespace octavo {
namespace {

template <typename Problem>
struct ProblemJob : Job {
  Problem problem;
  void (*function)(const Problem&, int64_t, int64_t) = nullptr;
  // Conversions of x, computed before the matmul.
  std::vector<float> even, odd;
  std::vector<int32_t> pairs;
  std::vector<int16_t> wide;

  void run(int64_t begin, int64_t end) override { function(problem, begin, end); }
};

ffi::Error float_matvec(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scale,
                        ffi::RemainingArgs levels, ffi::Result<ffi::AnyBuffer> y, bool transposed, int32_t bits, ffi::Span<const float> table,
                        std::string_view isa, int32_t threads) {
  if (!is_matrix(x) || !is_matrix(codes) || !is_matrix(scale) || !is_matrix(*y)) return wrong("operands are matrices");
  if (x.element_type() != ffi::F32 || y->element_type() != ffi::F32) return wrong("x and the product are float32");
  if (bits != 8 && bits != 4) return wrong("codes have 8 or 4 bits, got " + std::to_string(bits));
  if (codes.element_type() != (bits == 8 ? ffi::S8 : ffi::U8)) return wrong("8-bit codes are int8, packed ones uint8");
  if (bits == 4 && table.size() != 16) return wrong("a table has 16 values, got " + std::to_string(table.size()));
  const Version* how = version(isa);
  if (how == nullptr) return wrong("this processor has no " + std::string(isa));

  auto job = std::make_shared<ProblemJob<FloatProblem>>();
  FloatProblem& p = job->problem;
  p.m = x.dimensions()[0];
  p.k = x.dimensions()[1];
  if (ffi::Error error = take_matrix(codes, scale, table.begin(), transposed, p); error.failure()) return error;
  if (levels.size() != 0 && levels.size() != 2) return wrong("zero points and outer scales come together");
  if (levels.size() == 2) {
    const auto zero = levels.get<ffi::AnyBuffer>(0), outer = levels.get<ffi::AnyBuffer>(1);
    if (ffi::Error error = take_levels(*zero, *outer, p); error.failure()) return error;
    if (transposed && p.float_zero != nullptr) return wrong("zero points are for matrices [K, N]");
  }
  const int64_t stored = p.packed ? (p.k + 1) / 2 : p.k;
  if (y->dimensions()[0] != p.m || y->dimensions()[1] != p.n)
    return wrong("the product is " + text(y->dimensions()) + " of x " + text(x.dimensions()));
  p.y = static_cast<float*>(y->untyped_data());
  if (p.m == 0 || p.n == 0) return ffi::Error::Success();
  if (p.k == 0) {
    std::memset(p.y, 0, p.m * p.n * sizeof(float));
    return ffi::Error::Success();
  }
  p.x = static_cast<const float*>(x.untyped_data());
  if (p.packed && transposed) {
    job->even.resize(p.m * stored);
    job->odd.resize(p.m * stored);
    for (int64_t m = 0; m < p.m; ++m) {
      const float* row = p.x + m * p.k;
      float *even = job->even.data() + m * stored, *odd = job->odd.data() + m * stored;
      for (int64_t i = 0; i < p.k / 2; ++i) {
        even[i] = row[2 * i];
        odd[i] = row[2 * i + 1];
      }
      if (p.k % 2) {
        even[stored - 1] = row[p.k - 1];
        odd[stored - 1] = 0.0f;
      }
    }
    p.even = job->even.data();
    p.odd = job->odd.data();
  }
  if (!transposed) {
    const Parts cut(p.k);
    Team team{pool, threads};
    float* parts = cut.count == 1 ? p.y : scratch(cut.count * p.m * p.n);
    multiply(p, *how, team, parts);
    if (cut.count == 1) return ffi::Error::Success();
    team.run(p.m * p.n, 1024, cut.count * p.m * p.n * sizeof(float), [&](int64_t begin, int64_t end) {
      how->sum(nullptr, parts + begin, cut.count, p.m * p.n, end - begin, p.y + begin);
    });
    return ffi::Error::Success();
  }
  job->function = how->float_rows;
  share<ffi::ThreadPool>(job, p.n, 16, p.n * stored * p.m, threads, pool);
  return ffi::Error::Success();
}

ffi::Error int_matvec(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> y,
                      bool transposed, std::string_view isa, int32_t threads) {
  if (!is_matrix(x) || !is_matrix(w) || !is_matrix(*y)) return wrong("operands are matrices");
  if (x.element_type() != ffi::S8 || w.element_type() != ffi::S8 || y->element_type() != ffi::S32)
    return wrong("the operands are int8 and the product int32");
  const Version* how = version(isa);
  if (how == nullptr) return wrong("this processor has no " + std::string(isa));
  auto job = std::make_shared<ProblemJob<IntProblem>>();
  IntProblem& p = job->problem;
  p.m = x.dimensions()[0];
  p.k = x.dimensions()[1];
  p.n = w.dimensions()[transposed ? 0 : 1];
  if (w.dimensions()[transposed ? 1 : 0] != p.k)
    return wrong("x " + text(x.dimensions()) + " does not fit " + text(w.dimensions()));
  if (y->dimensions()[0] != p.m || y->dimensions()[1] != p.n)
    return wrong("the product is " + text(y->dimensions()) + " of x " + text(x.dimensions()));
  p.y = static_cast<int32_t*>(y->untyped_data());
  if (p.m == 0 || p.n == 0) return ffi::Error::Success();
  if (p.k == 0) {
    std::memset(p.y, 0, p.m * p.n * sizeof(int32_t));
    return ffi::Error::Success();
  }
  const int8_t* from = static_cast<const int8_t*>(x.untyped_data());
  p.w = static_cast<const int8_t*>(w.untyped_data());
  if (transposed) {
    job->wide.assign(from, from + p.m * p.k);
    p.wide = job->wide.data();
  } else {
    const int64_t half = (p.k + 1) / 2;
    job->pairs.resize(p.m * half);
    for (int64_t m = 0; m < p.m; ++m) {
      for (int64_t i = 0; i < half; ++i) {
        const int8_t* at = from + m * p.k + 2 * i;
        const int16_t pair[2] = {at[0], static_cast<int16_t>(2 * i + 1 < p.k ? at[1] : 0)};
        std::memcpy(&job->pairs[m * half + i], pair, sizeof pair);
      }
    }
    p.pairs = job->pairs.data();
  }
  job->function = transposed ? how->int_rows : how->int_columns;
  share<ffi::ThreadPool>(job, p.n, transposed ? 16 : 64, p.n * p.k * p.m, threads, pool);
  return ffi::Error::Success();
}

// Scales, biases and shifts of rows for each step along K.
struct RowParts {
  std::vector<float> scale, shift;
  std::vector<int32_t> bias;

  RowParts(TiledProblem& p, const float* x_scale, int64_t groups, Team team)
      : scale(p.m * p.steps), shift(scale.size()), bias(scale.size()) {
    const int32_t offset = p.packed ? 8 : 128;
    team.run(p.m, 1, p.m * p.k, [&, x_scale, groups, offset](int64_t begin, int64_t end) {
      for (int64_t i = begin * p.steps; i < end * p.steps; ++i) {
        const int8_t* x = p.rows + i * p.step;
        int32_t sum = 0;
        for (int64_t k = 0; k < p.step; ++k) sum += x[k];
        scale[i] = x_scale[i / p.steps * groups + i % p.steps * groups / p.steps];
        bias[i] = -offset * sum;
        shift[i] = -scale[i] * static_cast<float>(sum);
      }
    });
    p.row_scale = scale.data();
    p.bias = bias.data();
    p.shift = shift.data();
  }
};

ffi::Error tiled_matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer x_scale, ffi::AnyBuffer codes,
                        ffi::AnyBuffer scale, ffi::RemainingArgs levels, ffi::Result<ffi::AnyBuffer> y,
                        std::string_view isa, int32_t threads) {
  if (!is_matrix(x) || !is_matrix(x_scale) || !is_matrix(*y)) return wrong("operands are matrices");
  if (x.element_type() != ffi::S8 || x_scale.element_type() != ffi::F32 || y->element_type() != ffi::F32)
    return wrong("x is int8, and its scale and the product are float32");
  const Version* how = version(isa);
  if (how == nullptr) return wrong("this processor has no " + std::string(isa));
  TiledProblem p;
  p.m = x.dimensions()[0];
  p.k = x.dimensions()[1];
  const float no_table[16] = {};
  if (ffi::Error error = take_matrix(codes, scale, no_table, false, p); error.failure()) return error;
  if (levels.size() != 0 && levels.size() != 2) return wrong("zero points and outer scales come together");
  if (levels.size() == 2) {
    const auto zero = levels.get<ffi::AnyBuffer>(0), outer = levels.get<ffi::AnyBuffer>(1);
    if (ffi::Error error = take_levels(*zero, *outer, p); error.failure()) return error;
  }
  const int64_t groups = x_scale.dimensions()[1];
  if (x_scale.dimensions()[0] != p.m || groups < 1 || p.k % groups != 0)
    return wrong("scale " + text(x_scale.dimensions()) + " does not fit x " + text(x.dimensions()));
  if (y->dimensions()[0] != p.m || y->dimensions()[1] != p.n)
    return wrong("the product is " + text(y->dimensions()) + " of x " + text(x.dimensions()));
  p.step = std::min(p.k / groups, p.group);
  if (p.k == 0 || p.step % 4 != 0 || p.k / groups % p.step != 0 || p.group % p.step != 0)
    return wrong("one group is a multiple of the other, and both are of 4");
  p.steps = p.k / p.step;
  if (p.m == 0 || p.n == 0) return ffi::Error::Success();
  p.rows = static_cast<const int8_t*>(x.untyped_data());
  p.y = static_cast<float*>(y->untyped_data());
  Team team{pool, threads};
  const RowParts parts(p, static_cast<const float*>(x_scale.untyped_data()), groups, team);
  team.run(p.n, 64, p.m * p.n * p.k, [&](int64_t begin, int64_t end) { how->tiled(p, begin, end); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace octavo

XLA_FFI_DEFINE_HANDLER_SYMBOL(octavo_tiled_matmul, octavo::tiled_matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<std::string_view>("isa")
                                  .Attr<int32_t>("threads"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(octavo_float_matvec, octavo::float_matvec,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("transposed")
                                  .Attr<int32_t>("bits")
                                  .Attr<ffi::Span<const float>>("table")
                                  .Attr<std::string_view>("isa")
                                  .Attr<int32_t>("threads"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(octavo_int_matvec, octavo::int_matvec,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("transposed")
                                  .Attr<std::string_view>("isa")
                                  .Attr<int32_t>("threads"));

// The names of the versions that this processor supports, slowest first, separated by spaces.
extern "C" const char* octavo_versions() {
  static const std::string names = [] {
    const octavo::Version* found[octavo::kMostVersions];
    const int count = octavo::versions(found);
    std::string all;
    for (int i = 0; i < count; ++i) all += std::string(i ? " " : "") + found[i]->name;
    return all;
  }();
  return names.c_str();
}
