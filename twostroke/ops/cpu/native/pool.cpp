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

constexpr auto kSpin = std::chrono::microseconds(60);       // a worker's, after a job
constexpr auto kPatience = std::chrono::microseconds(100);  // the caller's, for the others to finish theirs
constexpr size_t kFetched = 256u << 10;  // bytes an idle worker brings in ahead: they must still be there when it reads them
constexpr size_t kFetchedAtOnce = 1024;  // bytes between two looks for a job

// Where stretch i of `threads` starts.
int64_t stretch(int64_t count, int i, int threads) { return count * i / threads; }

}  // namespace

Pool::Pool(int threads) : queues_(new Queue[(size_t)threads]) {
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

void Pool::run(int count, Task task, void* context, bool stretches) {
    if (count <= 0) return;
    if (workers_.empty() || count == 1) {
        for (int i = 0; i < count; ++i) task(context, i, 0);
        return;
    }
    const int n = threads();
    task_.store(task, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    count_.store(count, std::memory_order_relaxed);
    stretches_.store(stretches, std::memory_order_relaxed);
    unfinished_.store(count, std::memory_order_relaxed);
    const uint32_t job = job_.load(std::memory_order_relaxed) + 1;
    for (int i = 0; i < n; ++i) {
        const int64_t mine = stretches ? stretch(count, i + 1, n) - stretch(count, i, n) : i == 0 ? count : 0;
        queues_[(size_t)i].left.store((uint64_t)job << 32 | (uint64_t)mine, std::memory_order_release);
    }
    job_.store(job, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
        std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }
    drain(job, 0);
    wait_for_others();
}

void Pool::wait_for_others() {
    if (unfinished_.load(std::memory_order_acquire) == 0) return;
    const auto since = std::chrono::steady_clock::now();
    for (int spins = 1; unfinished_.load(std::memory_order_acquire) > 0; ++spins) {
        pause();
        if (spins % 64 || std::chrono::steady_clock::now() - since < kPatience) continue;
        std::unique_lock<std::mutex> lock(mutex_);
        waiting_.store(true, std::memory_order_seq_cst);
        done_.wait(lock, [&] { return unfinished_.load(std::memory_order_seq_cst) == 0; });
        waiting_.store(false, std::memory_order_relaxed);
    }
}

// A claim succeeds only while the job is unfinished, and the next job's fields are written after it is finished: what
// was read of task_, context_ and the like before a successful claim belongs to the claimed job.
void Pool::drain(uint32_t job, int worker) {
    const int n = threads();
    for (int turn = 0; turn < n; ++turn) {
        const int which = (worker + turn) % n;  // its own first, then the others'
        std::atomic<uint64_t>& left = queues_[(size_t)which].left;
        int done = 0;
        uint64_t seen = left.load(std::memory_order_acquire);
        while (seen >> 32 == job && (uint32_t)seen > 0) {
            const Task task = task_.load(std::memory_order_relaxed);
            void* const context = context_.load(std::memory_order_relaxed);
            const int count = count_.load(std::memory_order_relaxed);
            const bool stretches = stretches_.load(std::memory_order_relaxed);
            if (!left.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
            const int64_t end = stretches ? stretch(count, which + 1, n) : count;
            task(context, (int)(end - (int64_t)(uint32_t)seen), worker);
            ++done;
            seen = left.load(std::memory_order_acquire);
        }
        if (!done || unfinished_.fetch_sub(done, std::memory_order_seq_cst) != done) continue;
        if (waiting_.load(std::memory_order_seq_cst)) {  // either this sees that the caller waits, or it sees the zero
            std::lock_guard<std::mutex> lock(mutex_);
            done_.notify_one();
        }
    }
}

void Pool::rouse() {
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
    roused_.fetch_add(1, std::memory_order_seq_cst);
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
}

void Pool::announce(const void* data, size_t bytes) {
    if (workers_.empty()) return;
    coming_.store(reinterpret_cast<uintptr_t>(data), std::memory_order_relaxed);
    coming_bytes_.store(bytes, std::memory_order_relaxed);
    announced_.fetch_add(1, std::memory_order_release);
}

// Fetching is a hint to the processor: an address that is out of date costs time and nothing else.
void Pool::fetch_some(Fetch& fetch, int worker) {
    const uint32_t number = announced_.load(std::memory_order_acquire);
    if (number != fetch.number) {
        const size_t bytes = coming_bytes_.load(std::memory_order_relaxed);
        const size_t from = (size_t)stretch((int64_t)bytes, worker, threads()), to = (size_t)stretch((int64_t)bytes, worker + 1, threads());
        fetch.number = number;
        fetch.next = coming_.load(std::memory_order_relaxed) + from;
        fetch.end = fetch.next + (to - from < kFetched ? to - from : kFetched);
    }
    if (fetch.next >= fetch.end) return pause();
    for (size_t i = 0; i < kFetchedAtOnce; i += 64) __builtin_prefetch(reinterpret_cast<const void*>(fetch.next + i), 0, 2);
    fetch.next += kFetchedAtOnce;
}

void Pool::work(int worker) {
    uint32_t done = 0;  // the last job this worker has seen empty
    Fetch fetch;
    auto idle_since = std::chrono::steady_clock::now();
    for (int spins = 0; !stop_.load(std::memory_order_relaxed); ++spins) {
        const uint32_t job = job_.load(std::memory_order_acquire);
        if (job != done) {
            drain(job, worker);
            done = job;
            spins = 0;
            idle_since = std::chrono::steady_clock::now();
            continue;
        }
        fetch_some(fetch, worker);
        if (spins % 64 != 63 || std::chrono::steady_clock::now() - idle_since < kSpin) continue;
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        const uint32_t roused = roused_.load(std::memory_order_seq_cst);
        wake_.wait(lock, [&] {
            return stop_.load() || job_.load(std::memory_order_seq_cst) != done || roused_.load(std::memory_order_seq_cst) != roused;
        });
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
        idle_since = std::chrono::steady_clock::now();
    }
}
