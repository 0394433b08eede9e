#include "pool.h"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");  // about as long as x86's pause; yield is a no-op on most cores
#endif
}

constexpr auto kSpin = std::chrono::microseconds(200);

}  // namespace

Pool::Pool(int threads) {
    for (int w = 1; w < threads; ++w) workers_.emplace_back([this, w] { work(w); });
}

Pool::~Pool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_.store(true);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void Pool::run(int count, Task task, void* context) {
    if (count <= 0) return;
    if (workers_.empty() || count == 1) {
        for (int i = 0; i < count; ++i) task(context, i, 0);
        return;
    }
    task_.store(task, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    count_.store(count, std::memory_order_relaxed);
    unfinished_.store(count, std::memory_order_relaxed);
    const uint64_t job = ((ticket_.load(std::memory_order_relaxed) >> 32) + 1) << 32;
    ticket_.store(job | (uint32_t)count, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
        std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }
    drain(job, 0);
    for (int spins = 0; unfinished_.load(std::memory_order_acquire) > 0; ++spins) {
        if (spins < 4096) pause();
        else std::this_thread::yield();
    }
}

// A claim succeeds only while the job is unfinished, and until it is finished nobody writes the next job's fields: what
// was read of task_, context_ and count_ before a successful claim belongs to the claimed job.
void Pool::drain(uint64_t job, int worker) {
    uint64_t seen = ticket_.load(std::memory_order_acquire);
    while (seen >> 32 == job >> 32 && (uint32_t)seen > 0) {
        const Task task = task_.load(std::memory_order_relaxed);
        void* const context = context_.load(std::memory_order_relaxed);
        const int count = count_.load(std::memory_order_relaxed);
        if (!ticket_.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
        task(context, count - (int)(uint32_t)seen, worker);
        unfinished_.fetch_sub(1, std::memory_order_release);
        seen = ticket_.load(std::memory_order_acquire);
    }
}

void Pool::work(int worker) {
    uint64_t done = 0;  // the last job this worker has seen empty
    auto idle_since = std::chrono::steady_clock::now();
    for (int spins = 0; !stop_.load(std::memory_order_relaxed); ++spins) {
        const uint64_t seen = ticket_.load(std::memory_order_acquire);
        if (seen >> 32 != done >> 32) {
            drain(seen, worker);
            done = seen;
            spins = 0;
            idle_since = std::chrono::steady_clock::now();
            continue;
        }
        pause();
        if (spins % 64 != 63 || std::chrono::steady_clock::now() - idle_since < kSpin) continue;
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [&] { return stop_.load() || ticket_.load(std::memory_order_seq_cst) >> 32 != done >> 32; });
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
        idle_since = std::chrono::steady_clock::now();
    }
}
