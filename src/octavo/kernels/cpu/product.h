// Distributing the matmul with a matrix [K, N] over threads.
//
// Each takes some rows of the matrix, which are contiguous in memory, and all columns. Some columns of all rows would
// need no sum at the end, but each row of them is on another page: on a virtual machine with small pages, two threads
// were then no faster than one.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "checks.h"
#include "threads.h"

namespace octavo {

// Memory that a thread keeps from call to call: a new large block would be cleared by the system every time.
inline float* scratch(int64_t count) {
  thread_local std::unique_ptr<float[]> memory;
  thread_local int64_t size = 0;
  if (size < count) {
    memory.reset(new float[count]);
    size = count;
  }
  return memory.get();
}

template <typename Function>
struct Task : Job {
  explicit Task(Function f) : function(std::move(f)) {}
  void run(int64_t begin, int64_t end) override { function(begin, end); }
  Function function;
};

struct Team {
  ffi::ThreadPool& pool;
  int64_t threads;

  // Calls function(begin, end) until `size` is covered, on all threads, and returns when all of it is done.
  template <typename Function>
  void run(int64_t size, int64_t unit, int64_t cost, Function function) {
    share<ffi::ThreadPool>(std::make_shared<Task<Function>>(std::move(function)), size, unit, cost, threads, pool);
  }
};

// The partition of K, which depends on the shape alone, and so do the bits of the sums.
struct Parts {
  int64_t rows, count;  // about six, of whole blocks of rows
  explicit Parts(int64_t k) : rows(std::max<int64_t>(64, (k + 191) / 192 * 32)), count((k + rows - 1) / rows) {}
};

// Writes the sums of all parts, [parts, M, N], to `parts`.
inline void multiply(const FloatProblem& p, const Version& how, Team team, float* parts) {
  constexpr int64_t kUnit = 64;  // columns: a line of codes
  const Parts cut(p.k);
  const int64_t cost = p.m * p.n * (p.packed ? (p.k + 1) / 2 : p.k), units = (p.n + kUnit - 1) / kUnit;
  // Where there are fewer parts than threads, columns are partitioned as well.
  const int64_t wanted = (2 * workers(cost, team.threads, team.pool) + cut.count - 1) / cut.count;
  const int64_t width = (units + std::min(wanted, units) - 1) / std::min(wanted, units) * kUnit;
  const int64_t strips = (p.n + width - 1) / width;
  team.run(cut.count * strips, 1, cost, [&, width, strips](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      FloatProblem part = p;
      part.from = i / strips * cut.rows;
      part.until = std::min(part.from + cut.rows, p.k);
      part.y = parts + i / strips * p.m * p.n;
      how.float_columns(part, i % strips * width, std::min(i % strips * width + width, p.n));
    }
  });
}

}  // namespace octavo
