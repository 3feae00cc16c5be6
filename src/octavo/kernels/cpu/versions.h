// The instruction sets with kernels, and which of them this processor supports.
#pragma once

#include <string_view>

#include "problem.h"

namespace octavo {

constexpr int kMostVersions = 4;

// The versions that this processor supports, slowest first; returns their number.
int versions(const Version** found);

// The one of that name, or the fastest for an empty one; null if there is none.
const Version* version(std::string_view wanted);

}  // namespace octavo
