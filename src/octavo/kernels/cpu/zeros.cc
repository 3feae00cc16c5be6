// Zeros whose pages take no memory until they are written: a cache for long texts costs what short ones fill.

#include <cstdint>
#include <cstring>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace octavo {
namespace {

ffi::Error zeros(ffi::Result<ffi::AnyBuffer> out) {
  char* begin = static_cast<char*>(out->untyped_data());
  char* end = begin + out->size_bytes();
#ifdef __linux__
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  char* first = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(begin) + page - 1) / page * page);
  char* last = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(end) / page * page);
  // Private anonymous pages are zeros again when they are next touched; it fails for memory that is locked.
  if (first < last && madvise(first, last - first, MADV_DONTNEED) == 0) {
    std::memset(begin, 0, first - begin);
    begin = last;
  }
#endif
  std::memset(begin, 0, end - begin);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace octavo

XLA_FFI_DEFINE_HANDLER_SYMBOL(octavo_zeros, octavo::zeros, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());
