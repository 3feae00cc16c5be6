// The kernels compiled for several instruction sets.

#include "versions.h"

#include <cmath>
#include <type_traits>
#include <vector>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define OCTAVO_X86 1
#include <immintrin.h>
#endif

#define OCTAVO_STRING(x) #x
#if defined(__clang__)
#define OCTAVO_TARGET(features) \
  _Pragma(OCTAVO_STRING(clang attribute push(__attribute__((target(features))), apply_to = function)))
#define OCTAVO_END_TARGET _Pragma("clang attribute pop")
#else
#define OCTAVO_TARGET(features) _Pragma("GCC push_options") _Pragma(OCTAVO_STRING(GCC target(features)))
#define OCTAVO_END_TARGET _Pragma("GCC pop_options")
#endif

namespace octavo {

#define OCTAVO_UNROLL
namespace portable {
#include "vector_portable.inc"
#include "scales.inc"
#include "float_body.inc"
#include "int_body.inc"
#include "tiled_body.inc"
#include "small_floats.inc"
#include "codes.inc"
#include "quantize_body.inc"
#include "layer_body.inc"
constexpr Version kVersion = {"portable", float_columns, float_rows, int_columns, int_rows, tiled,
                              sum,    norm,          rotate,     keep,        attend,   gate,  quantize, noise};
}  // namespace portable
#undef OCTAVO_UNROLL

#ifdef OCTAVO_X86
// Sums stay in registers only if the loops over them are fully unrolled.
#define OCTAVO_UNROLL _Pragma("GCC unroll 8")
OCTAVO_TARGET("avx2,fma,f16c")
namespace avx2 {
#include "vector_avx2.inc"
#include "scales.inc"
#include "float_body.inc"
#include "int_body.inc"
#include "tiled_body.inc"
#include "small_floats.inc"
#include "codes.inc"
#include "quantize_body.inc"
#include "layer_body.inc"
constexpr Version kVersion = {"avx2", float_columns, float_rows, int_columns, int_rows, tiled,
                              sum,    norm,          rotate,     keep,        attend,   gate,  quantize, noise};
}  // namespace avx2
OCTAVO_END_TARGET

OCTAVO_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
namespace avx512 {
#include "vector_avx512.inc"
#include "scales.inc"
#include "float_body.inc"
#include "int_body.inc"
#include "tiled_body.inc"
#include "small_floats.inc"
#include "codes.inc"
#include "quantize_body.inc"
#include "layer_body.inc"
constexpr Version kVersion = {"avx512", float_columns, float_rows, int_columns, int_rows, tiled,
                              sum,    norm,          rotate,     keep,        attend,   gate,  quantize, noise};
}  // namespace avx512
OCTAVO_END_TARGET

#define OCTAVO_VNNI 1
OCTAVO_TARGET("avx512vnni,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
namespace avx512_vnni {
#include "vector_avx512.inc"
#include "scales.inc"
#include "int_body.inc"
#include "tiled_body.inc"
constexpr Version kVersion = {"avx512_vnni", avx512::float_columns, avx512::float_rows, int_columns,  int_rows,
                              tiled,         avx512::sum,           avx512::norm,       avx512::rotate,
                              avx512::keep,  avx512::attend,        avx512::gate,       avx512::quantize,
                              avx512::noise};
}  // namespace avx512_vnni
OCTAVO_END_TARGET
#undef OCTAVO_VNNI
#undef OCTAVO_UNROLL
#endif

int versions(const Version** found) {
  int count = 0;
  found[count++] = &portable::kVersion;
#ifdef OCTAVO_X86
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    found[count++] = &avx2::kVersion;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
      found[count++] = &avx512::kVersion;
      if (__builtin_cpu_supports("avx512vnni")) found[count++] = &avx512_vnni::kVersion;
    }
  }
#endif
  return count;
}

const Version* version(std::string_view wanted) {
  const Version* found[kMostVersions];
  const int count = versions(found);
  if (wanted.empty()) return found[count - 1];
  for (int i = 0; i < count; ++i)
    if (wanted == found[i]->name) return found[i];
  return nullptr;
}

}  // namespace octavo
