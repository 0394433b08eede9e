// A few threads that stay: run(count, task) calls task(index, worker) once for every index, the caller helping.
//
// Indices are claimed one at a time from one word, so a worker that the system put aside delays nobody but itself, and
// which thread does what never matters for a result. Workers spin for a moment after each job (the next matmul comes
// within microseconds) and then sleep.
#pragma once
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

class Pool {
public:
    using Task = void (*)(void* context, int index, int worker);

    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return (int)workers_.size() + 1; }

    // Blocks until every index was done. One caller at a time.
    void run(int count, Task task, void* context);

    template <class Body> void each(int count, Body& body) {
        run(count, [](void* b, int index, int worker) { (*static_cast<Body*>(b))(index, worker); }, &body);
    }

private:
    void work(int worker);
    void drain(uint64_t job, int worker);

    // High half: the job's number. Low half: how many of its indices are unclaimed.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int> unfinished_{0};
    std::atomic<Task> task_{nullptr};
    std::atomic<void*> context_{nullptr};
    std::atomic<int> count_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};
