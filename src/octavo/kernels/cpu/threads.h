// Distributing a job over XLA's threads.
//
// The caller works too, and waits only for pieces that another thread has begun: a pool that is busy with other work
// delays nothing. Waking a sleeping thread takes as long as a small matmul, so a helper stays awake for a moment in
// case the next layer follows.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {

inline void breathe() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr int64_t kMostPieces = 64;

// A job in pieces that are computed in any order. Each thread has adjacent ones, whose data is contiguous, and takes
// those of other threads when its own are done.
class Job {
 public:
  virtual ~Job() = default;

  void cut(int64_t size, int64_t piece, int64_t threads) {
    size_ = size;
    piece_ = piece;
    pieces_ = (size + piece - 1) / piece;
    threads_ = threads;
  }

  void work() {
    const int64_t start = joined_.fetch_add(1, std::memory_order_relaxed) % threads_ * pieces_ / threads_;
    for (int64_t j = 0; j < pieces_; ++j) {
      const int64_t i = start + j < pieces_ ? start + j : start + j - pieces_;
      if (taken_[i].load(std::memory_order_relaxed) || taken_[i].exchange(true, std::memory_order_relaxed)) continue;
      const int64_t begin = i * piece_, end = begin + piece_ < size_ ? begin + piece_ : size_;
      run(begin, end);
      done_.fetch_add(1, std::memory_order_release);
    }
  }

  void wait() const {
    for (int spins = 0; done_.load(std::memory_order_acquire) < pieces_; ++spins) {
      if (spins < 2048) {
        breathe();
      } else {
        std::this_thread::yield();
      }
    }
  }

 protected:
  virtual void run(int64_t begin, int64_t end) = 0;

 private:
  int64_t size_ = 0, piece_ = 1, pieces_ = 0, threads_ = 1;
  std::atomic<int64_t> joined_{0}, done_{0};
  std::atomic<bool> taken_[kMostPieces] = {};
};

// Where helpers that are still awake look for the next job.
class Bench {
 public:
  static Bench& instance() {
    static Bench* bench = new Bench();  // never destroyed: helpers may outlive static objects
    return *bench;
  }

  // Offers a job to helpers that are awake, and returns how many there are.
  int64_t offer(const std::shared_ptr<Job>& job, int64_t wanted) {
    if (awake_.load(std::memory_order_relaxed) == 0) return 0;
    std::lock_guard<std::mutex> lock(mutex_);
    const int64_t found = awake_.load(std::memory_order_relaxed) < wanted ? awake_.load() : wanted;
    if (found == 0 || seats_.load(std::memory_order_relaxed) != 0) return 0;
    job_ = job;
    seats_.store(found, std::memory_order_release);
    return found;
  }

  // Takes an offer back.
  void close(const std::shared_ptr<Job>& job) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (job_ != job) return;
    job_.reset();
    seats_.store(0, std::memory_order_relaxed);
  }

  // Works on a job, and on those that are offered soon after. At most `most` helpers stay.
  void help(std::shared_ptr<Job> job, int64_t most) {
    while (job != nullptr) {
      job->work();
      job.reset();
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (awake_.load(std::memory_order_relaxed) >= most) return;
        awake_.fetch_add(1, std::memory_order_relaxed);
      }
      const auto until = std::chrono::steady_clock::now() + kPatience;
      for (bool late = false; seats_.load(std::memory_order_acquire) == 0 && !late;) {
        for (int i = 0; i < 16 && seats_.load(std::memory_order_relaxed) == 0; ++i) breathe();
        late = std::chrono::steady_clock::now() > until;
      }
      std::lock_guard<std::mutex> lock(mutex_);
      awake_.fetch_sub(1, std::memory_order_relaxed);
      if (seats_.load(std::memory_order_relaxed) > 0) {
        job = job_;
        if (seats_.fetch_sub(1, std::memory_order_relaxed) == 1) job_.reset();
      }
    }
  }

 private:
  static constexpr std::chrono::microseconds kPatience{200};

  std::mutex mutex_;
  std::shared_ptr<Job> job_;
  std::atomic<int64_t> seats_{0}, awake_{0};
};

// Less than this is done before another thread is awake.
constexpr int64_t kSmall = 32 << 10;

// The number of threads for a job that reads about `cost` bytes; `limit` forces a number.
template <typename Pool>
int64_t workers(int64_t cost, int64_t limit, Pool& pool) {
  return limit > 0 ? limit : (cost < kSmall ? 1 : pool.num_threads());
}

// Runs a job over `size` outputs, in pieces of whole units.
template <typename Pool>
void share(const std::shared_ptr<Job>& job, int64_t size, int64_t unit, int64_t cost, int64_t limit, Pool& pool) {
  const int64_t units = (size + unit - 1) / unit;
  int64_t threads = workers(cost, limit, pool);
  threads = threads < units ? threads : units;
  threads = threads < 1 ? 1 : threads;
  // Several pieces for each thread, since another program may delay one of them.
  const int64_t most = 4 * threads < kMostPieces ? 4 * threads : kMostPieces;
  const int64_t pieces = threads == 1 ? 1 : (most < units ? most : units);
  job->cut(size, (units + pieces - 1) / pieces * unit, threads);
  if (threads == 1) return job->work();
  Bench& bench = Bench::instance();
  for (int64_t i = 1 + bench.offer(job, threads - 1); i < threads; ++i)
    pool.Schedule([job, threads] { Bench::instance().help(job, threads - 1); });
  job->work();
  bench.close(job);
  job->wait();
}

}  // namespace octavo
