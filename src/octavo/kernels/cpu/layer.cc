// A decoder layer for the new tokens of each slot, one in each row, as one XLA custom call:
//
//   x += out(attention(rotate(query_key_value(norm(x)))));  x += wo(silu(gate(norm(x))) * up(norm(x)))
//
// Between its matmuls a layer has only a few thousand operations. As separate programs, each of which wakes threads,
// they and the matmuls took twice as long as reading the weights.

#include <algorithm>
#include <string>
#include <string_view>

#include "product.h"
#include "versions.h"

namespace octavo {
namespace {

constexpr int64_t kUnit = 64;

const float* floats(const ffi::AnyBuffer& b) { return static_cast<const float*>(b.untyped_data()); }

bool has_shape(const ffi::AnyBuffer& b, ffi::DataType type, std::initializer_list<int64_t> shape) {
  const auto dims = b.dimensions();
  return b.element_type() == type && std::equal(shape.begin(), shape.end(), dims.begin(), dims.end());
}

bool is_floats(const ffi::AnyBuffer& b, std::initializer_list<int64_t> shape) { return has_shape(b, ffi::F32, shape); }

struct Layer {
  int64_t rows = 0, size = 0, heads = 0, hidden = 0;
  float epsilon = 0.0f;
  const float *x = nullptr, *cos = nullptr, *sin = nullptr;
  const float *norm_in = nullptr, *norm_mid = nullptr;
  const float *bias = nullptr, *query_norm = nullptr, *key_norm = nullptr;  // or null
  FloatProblem mix, out, wi, wo;
  AttendProblem attention;
  float* y = nullptr;
};

// One row of queries, keys and values, in `row`, as attention takes them; keys and values are stored. A position beyond
// the last is not: it would overwrite another.
void prepare(const Layer& layer, const Version& how, int64_t m, float* row) {
  const AttendProblem& a = layer.attention;
  const int64_t half = a.dim / 2;
  const float factor = 1.0f / __builtin_sqrtf(static_cast<float>(a.dim));
  if (layer.bias != nullptr)
    for (int64_t i = 0; i < layer.mix.n; ++i) row[i] += layer.bias[i];
  for (int64_t h = 0; h < a.heads + a.kv_heads; ++h) {
    const bool is_query = h < a.heads;
    float* head = row + h * a.dim;
    const float* scale = is_query ? layer.query_norm : layer.key_norm;
    if (scale != nullptr) how.norm(head, scale, layer.epsilon, a.dim, head);
    how.rotate(head, layer.cos + m * half, layer.sin + m * half, is_query ? factor : 1.0f, half);
  }
  how.keep(a, m);
}

void run(Layer& layer, const Version& how, Team team) {
  const int64_t m = layer.rows, size = layer.size, hidden = layer.hidden, context = layer.out.k, mixed = layer.mix.n;
  const Parts of_size(size), of_context(context), of_hidden(hidden);
  const int64_t widest = std::max({of_size.count * std::max(mixed, 2 * hidden), of_context.count * size,
                                   of_hidden.count * size});
  float* normal = scratch(m * (size + mixed + context + 3 * hidden + widest));
  float* heads = normal + m * size;
  float* seen = heads + m * mixed;
  float* gated = seen + m * context;
  float* pair = gated + m * hidden;
  float* parts = pair + m * 2 * hidden;
  AttendProblem& a = layer.attention;
  layer.mix.x = layer.wi.x = normal;
  layer.out.x = a.context = seen;
  layer.wo.x = gated;
  a.mixed = heads;

  const auto norm = [&](const float* x, const float* scale, int64_t i) {
    how.norm(x + i * size, scale, layer.epsilon, size, normal + i * size);
  };
  for (int64_t i = 0; i < m; ++i) norm(layer.x, layer.norm_in, i);
  multiply(layer.mix, how, team, parts);
  team.run(m, 1, of_size.count * m * mixed * sizeof(float), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      how.sum(nullptr, parts + i * mixed, of_size.count, m * mixed, mixed, heads + i * mixed);
      prepare(layer, how, i, heads + i * mixed);
    }
  });
  int64_t positions = 0;
  for (int64_t i = 0; i < m; ++i) positions += a.positions[i] > 0 ? a.positions[i] : 0;
  team.run(m * a.heads, 1, positions * a.heads * a.dim * 8,
           [&](int64_t begin, int64_t end) { how.attend(a, begin, end); });
  multiply(layer.out, how, team, parts);
  team.run(m, 1, of_context.count * m * size * sizeof(float), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      how.sum(layer.x + i * size, parts + i * size, of_context.count, m * size, size, layer.y + i * size);
      norm(layer.y, layer.norm_mid, i);
    }
  });
  multiply(layer.wi, how, team, parts);
  team.run(hidden, kUnit, of_size.count * m * 2 * hidden * sizeof(float), [&](int64_t begin, int64_t end) {
    for (int64_t i = 0; i < m; ++i) {
      const int64_t at = i * 2 * hidden + begin;
      how.sum(nullptr, parts + at, of_size.count, m * 2 * hidden, end - begin, pair + at);
      how.sum(nullptr, parts + at + hidden, of_size.count, m * 2 * hidden, end - begin, pair + at + hidden);
      how.gate(pair + at, pair + at + hidden, end - begin, gated + i * hidden + begin);
    }
  });
  multiply(layer.wo, how, team, parts);
  team.run(m, 1, of_hidden.count * m * size * sizeof(float), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      how.sum(layer.y + i * size, parts + i * size, of_hidden.count, m * size, size, layer.y + i * size);
  });
}

enum Operand { kNormIn, kMix, kOut = 3, kNormMid = 5, kWi, kWo = 8, kBias = 10, kQueryNorm, kKeyNorm, kOperands };

ffi::Error layer_call(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer cos, ffi::AnyBuffer sin,
                      ffi::AnyBuffer positions, ffi::AnyBuffer keys, ffi::AnyBuffer values, ffi::AnyBuffer key_scale,
                      ffi::AnyBuffer value_scale, ffi::RemainingArgs more, ffi::Result<ffi::AnyBuffer> y,
                      ffi::Result<ffi::AnyBuffer> new_keys, ffi::Result<ffi::AnyBuffer> new_values,
                      ffi::Result<ffi::AnyBuffer> new_key_scale, ffi::Result<ffi::AnyBuffer> new_value_scale, int32_t heads, int32_t limit, float epsilon,
                      ffi::Span<const float> tables, std::string_view isa, int32_t threads) {
  const Version* how = version(isa);
  if (how == nullptr) return wrong("this processor has no " + std::string(isa));
  // With e3m4 scales, the zero points and the outer scales of the four matrices follow.
  const bool levels = more.size() == kOperands + 8;
  if (!levels && more.size() != kOperands) return wrong("a layer has " + std::to_string(kOperands) + " parameters");
  ffi::AnyBuffer operand[kOperands] = {*more.get<ffi::AnyBuffer>(0), *more.get<ffi::AnyBuffer>(1),
                                       *more.get<ffi::AnyBuffer>(2), *more.get<ffi::AnyBuffer>(3),
                                       *more.get<ffi::AnyBuffer>(4), *more.get<ffi::AnyBuffer>(5),
                                       *more.get<ffi::AnyBuffer>(6), *more.get<ffi::AnyBuffer>(7),
                                       *more.get<ffi::AnyBuffer>(8), *more.get<ffi::AnyBuffer>(9),
                                       *more.get<ffi::AnyBuffer>(10), *more.get<ffi::AnyBuffer>(11),
                                       *more.get<ffi::AnyBuffer>(12)};
  if (!is_matrix(x) || x.element_type() != ffi::F32) return wrong("x is a matrix of float32");
  if (keys.dimensions().size() != 4 || heads < 1) return wrong("keys are [slots, kv_heads, dim, time]");
  if (tables.size() != 64) return wrong("there are four tables of 16 values");

  Layer layer;
  layer.rows = x.dimensions()[0];
  layer.size = x.dimensions()[1];
  layer.epsilon = epsilon;
  AttendProblem& a = layer.attention;
  a.heads = heads;
  a.kv_heads = keys.dimensions()[1];
  a.dim = keys.dimensions()[2];
  a.time = keys.dimensions()[3];
  a.limit = std::min<int64_t>(limit, a.time);
  const int64_t rows = layer.rows, half = a.dim / 2, slots = keys.dimensions()[0];
  if (rows == 0 || layer.size == 0 || keys.element_count() == 0) return wrong("a layer of nothing");
  if (a.dim % 2 != 0 || heads % a.kv_heads != 0) return wrong("heads are of even size, and share keys evenly");
  if (rows % slots != 0) return wrong("slots have the same number of new tokens");
  a.tokens = rows / slots;
  const ffi::DataType stored = keys.element_type();
  const bool low = stored == ffi::S8;
  if ((!low && stored != ffi::F32) || !has_shape(keys, stored, {slots, a.kv_heads, a.dim, a.time}) ||
      !has_shape(values, stored, {slots, a.kv_heads, a.time, a.dim}))
    return wrong("keys " + text(keys.dimensions()) + " and values " + text(values.dimensions()) + " do not fit");
  if (low && (!is_floats(key_scale, {slots, a.kv_heads, 1, a.time}) ||
              !is_floats(value_scale, {slots, a.kv_heads, a.time, 1})))
    return wrong("keys and values in int8 have a scale for each head and position");
  if (!is_floats(cos, {rows, half}) || !is_floats(sin, {rows, half})) return wrong("there is an angle for each pair");
  if (positions.element_type() != ffi::S32 || positions.dimensions().size() != 1 || positions.dimensions()[0] != rows)
    return wrong("there is a position for each row");
  if (new_keys->untyped_data() != keys.untyped_data() || new_values->untyped_data() != values.untyped_data() ||
      (low && (new_key_scale->untyped_data() != key_scale.untyped_data() ||
               new_value_scale->untyped_data() != value_scale.untyped_data())))
    return wrong("keys and values are written where they are");
  if (!is_floats(*y, {rows, layer.size})) return wrong("the result has the shape of x");

  struct Wanted {
    FloatProblem& problem;
    Operand where;
    int64_t k;
  };
  const int64_t context = heads * a.dim, mixed = context + 2 * a.kv_heads * a.dim;
  layer.wi.n = operand[kWi].dimensions().size() == 2 ? operand[kWi].dimensions()[1] : 0;
  layer.hidden = layer.wi.n / 2;
  const float* table = tables.begin();
  size_t level = kOperands;
  for (const Wanted& w : {Wanted{layer.mix, kMix, layer.size}, Wanted{layer.out, kOut, context},
                          Wanted{layer.wi, kWi, layer.size}, Wanted{layer.wo, kWo, layer.hidden}}) {
    w.problem.m = rows;
    w.problem.k = w.k;
    if (ffi::Error error = take_matrix(operand[w.where], operand[w.where + 1], table, false, w.problem);
        error.failure())
      return error;
    if (levels) {
      const auto zero = more.get<ffi::AnyBuffer>(level), outer = more.get<ffi::AnyBuffer>(level + 1);
      if (ffi::Error error = take_levels(*zero, *outer, w.problem); error.failure()) return error;
      level += 2;
    }
    table += 16;
  }
  if (layer.mix.n != mixed || layer.out.n != layer.size || layer.wi.n % 2 != 0 || layer.wi.n == 0 ||
      layer.wo.n != layer.size)
    return wrong("the matrices do not fit together");
  if (!is_floats(operand[kNormIn], {layer.size}) || !is_floats(operand[kNormMid], {layer.size}))
    return wrong("norms have a value for each of x");
  const auto some = [&](Operand which, int64_t size, const float** into) {
    if (operand[which].element_count() == 0) return true;
    *into = floats(operand[which]);
    return is_floats(operand[which], {size});
  };
  if (!some(kBias, mixed, &layer.bias) || !some(kQueryNorm, a.dim, &layer.query_norm) ||
      !some(kKeyNorm, a.dim, &layer.key_norm))
    return wrong("a bias is for all heads, a norm for one");

  layer.x = floats(x);
  layer.cos = floats(cos);
  layer.sin = floats(sin);
  layer.norm_in = floats(operand[kNormIn]);
  layer.norm_mid = floats(operand[kNormMid]);
  layer.y = static_cast<float*>(y->untyped_data());
  a.positions = static_cast<const int32_t*>(positions.untyped_data());
  a.keys = new_keys->untyped_data();
  a.values = new_values->untyped_data();
  a.key_scale = low ? static_cast<float*>(new_key_scale->untyped_data()) : nullptr;
  a.value_scale = low ? static_cast<float*>(new_value_scale->untyped_data()) : nullptr;
  run(layer, *how, Team{pool, threads});
  return ffi::Error::Success();
}

}  // namespace
}  // namespace octavo

XLA_FFI_DEFINE_HANDLER_SYMBOL(octavo_decode_layer, octavo::layer_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<int32_t>("heads")
                                  .Attr<int32_t>("limit")
                                  .Attr<float>("epsilon")
                                  .Attr<xla::ffi::Span<const float>>("tables")
                                  .Attr<std::string_view>("isa")
                                  .Attr<int32_t>("threads"));
