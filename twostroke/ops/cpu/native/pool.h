// A few threads that stay: run(count, task) calls task(index, worker) once for every index, the caller helping.
//
// Indices are claimed one at a time, so a worker that the system put aside delays only itself, and which thread does
// what never matters for a result. They are claimed from one queue, or each thread has a stretch of its own (it
// reads memory front to back) and helps the others when it is done. Workers spin for a moment after each job (the next
// matmul comes within microseconds), fetching what the next one will read, and then sleep. So does the caller once it
// has waited that long for the others: where the system has put one of them aside, it now has a core to go on with.
#pragma once
#include <atomic>
#include <condition_variable>
#include <memory>
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

    // Blocks until every index was done. One caller at a time. stretches: see above.
    void run(int count, Task task, void* context, bool stretches = false);

    template <class Body> void each(int count, Body& body, bool stretches = false) {
        run(count, [](void* b, int index, int worker) { (*static_cast<Body*>(b))(index, worker); }, &body, stretches);
    }

    // A job comes soon: workers that sleep wake up and spin for a moment. Waking takes tens of microseconds.
    void rouse();

    // What a coming job over stretches will read: idle workers bring the start of theirs into their caches.
    void announce(const void* data, size_t bytes);

private:
    struct Fetch {  // how far a worker is in what was announced
        uint32_t number = 0;
        uintptr_t next = 0, end = 0;
    };
    struct alignas(64) Queue {
        std::atomic<uint64_t> left{0};  // high half: the job's number; low half: how many of its indices are unclaimed
    };

    void work(int worker);
    void drain(uint32_t job, int worker);
    void wait_for_others();
    void fetch_some(Fetch& fetch, int worker);

    std::unique_ptr<Queue[]> queues_;  // one for each thread; without stretches only the first is used
    alignas(64) std::atomic<uint32_t> job_{0};
    alignas(64) std::atomic<int> unfinished_{0};
    std::atomic<Task> task_{nullptr};
    std::atomic<void*> context_{nullptr};
    std::atomic<int> count_{0};
    std::atomic<bool> stretches_{false};
    alignas(64) std::atomic<uint32_t> announced_{0};  // how often
    std::atomic<uintptr_t> coming_{0};
    std::atomic<size_t> coming_bytes_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<uint32_t> roused_{0};  // how often
    std::atomic<bool> waiting_{false};  // the caller sleeps until nothing is unfinished
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::vector<std::thread> workers_;
};
