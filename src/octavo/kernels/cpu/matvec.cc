// Products of few rows with a quantized matrix, as XLA custom calls: checks, and the choice of instructions.

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "threads.h"
#include "versions.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace octavo {
namespace {

ffi::Error wrong(const std::string& what) { return ffi::Error::InvalidArgument("octavo: " + what); }

std::string text(ffi::AnyBuffer::Dimensions dims) {
  std::string out = "[";
  for (size_t i = 0; i < dims.size(); ++i) out += (i ? ", " : "") + std::to_string(dims[i]);
  return out + "]";
}

const Version* version(std::string_view wanted) {
  const Version* found[kMostVersions];
  const int count = versions(found);
  if (wanted.empty()) return found[count - 1];
  for (int i = 0; i < count; ++i)
    if (wanted == found[i]->name) return found[i];
  return nullptr;
}

template <typename Problem>
struct ProblemJob : Job {
  Problem problem;
  void (*function)(const Problem&, int64_t, int64_t) = nullptr;
  // What is made of x before the work begins.
  std::vector<float> even, odd;
  std::vector<int32_t> pairs;
  std::vector<int16_t> wide;

  void run(int64_t begin, int64_t end) override { function(problem, begin, end); }
};

// ---- Checks. Every size comes from the buffers themselves.

bool is_matrix(const ffi::AnyBuffer& b) { return b.dimensions().size() == 2; }

ffi::Error float_matvec(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scale,
                        ffi::Result<ffi::AnyBuffer> y, bool transposed, int32_t bits, ffi::Span<const float> table,
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
  p.packed = bits == 4;
  const int64_t stored = p.packed ? (p.k + 1) / 2 : p.k;
  p.n = codes.dimensions()[transposed ? 0 : 1];
  p.groups = scale.dimensions()[transposed ? 1 : 0];
  if (codes.dimensions()[transposed ? 1 : 0] != stored)
    return wrong("x " + text(x.dimensions()) + " does not fit codes " + text(codes.dimensions()));
  if (scale.dimensions()[transposed ? 0 : 1] != p.n || p.groups < 1 || p.k % p.groups != 0)
    return wrong("scale " + text(scale.dimensions()) + " does not fit codes " + text(codes.dimensions()));
  if (y->dimensions()[0] != p.m || y->dimensions()[1] != p.n)
    return wrong("the product is " + text(y->dimensions()) + " of x " + text(x.dimensions()));
  p.group = p.k / p.groups;
  if (p.packed && p.groups > 1 && p.group % 2 != 0) return wrong("groups of packed codes are even");
  switch (scale.element_type()) {
    case ffi::F32: p.scale_type = ScaleType::kF32; break;
    case ffi::BF16: p.scale_type = ScaleType::kBF16; break;
    case ffi::F16: p.scale_type = ScaleType::kF16; break;
    default: return wrong("scales are float32, bfloat16 or float16");
  }
  p.y = static_cast<float*>(y->untyped_data());
  if (p.m == 0 || p.n == 0) return ffi::Error::Success();
  if (p.k == 0) {
    std::memset(p.y, 0, p.m * p.n * sizeof(float));
    return ffi::Error::Success();
  }
  p.x = static_cast<const float*>(x.untyped_data());
  p.codes = static_cast<const uint8_t*>(codes.untyped_data());
  p.scale = scale.untyped_data();
  if (p.packed) std::memcpy(p.table, table.begin(), sizeof p.table);
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
  job->function = transposed ? how->float_rows : how->float_columns;
  share<ffi::ThreadPool>(job, p.n, transposed ? 16 : 64, p.n * stored * p.m, threads, pool);
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

}  // namespace
}  // namespace octavo

XLA_FFI_DEFINE_HANDLER_SYMBOL(octavo_float_matvec, octavo::float_matvec,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
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

// The names of the versions that this processor runs, from the slowest to the fastest, apart by spaces.
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
