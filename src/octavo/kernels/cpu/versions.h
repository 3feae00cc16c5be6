// Which instruction sets there are functions for, and which of them this processor runs.
#pragma once

#include <string_view>

#include "problem.h"

namespace octavo {

constexpr int kMostVersions = 4;

// Those that this processor runs, from the slowest to the fastest; returns how many.
int versions(const Version** found);

// The one of that name, or the fastest for an empty one; null if there is none.
const Version* version(std::string_view wanted);

}  // namespace octavo
