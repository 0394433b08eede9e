// Each rank has a seat with the number of its latest sum, and two buffers: it writes one while others may still read the
// other. It cannot get two sums ahead of a rank, because each sum needs that rank's part.
#include "ranks.h"

#include <atomic>
#include <chrono>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#else
#include <thread>
#endif

namespace {

constexpr size_t kSeatBytes = 128;                      // so that seats share no cache line
constexpr auto kSpin = std::chrono::microseconds(200);  // parts come within moments of each other

struct Seat {
    std::atomic<uint32_t> turn;      // of the latest part
    std::atomic<uint32_t> sleepers;  // ranks that wait for the next one
};
static_assert(sizeof(Seat) <= kSeatBytes && std::atomic<uint32_t>::is_always_lock_free, "shared between processes");

Seat& seat(void* memory, int rank) { return *reinterpret_cast<Seat*>((char*)memory + (size_t)rank * kSeatBytes); }

float* buffer(void* memory, int parts, int64_t most, int rank, uint32_t turn) {
    float* first = reinterpret_cast<float*>((char*)memory + (size_t)parts * kSeatBytes);
    return first + ((int64_t)rank * 2 + turn % 2) * most;
}

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
}

void sleep_on(std::atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds most) {
#if defined(__linux__)
    timespec limit{(time_t)(most.count() / 1000000000), (long)(most.count() % 1000000000)};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
    (void)word, (void)seen, (void)most;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

void wake(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

bool arrived(uint32_t found, uint32_t turn) { return (int32_t)(found - turn) >= 0; }

bool wait_for(Seat& other, uint32_t turn, std::chrono::steady_clock::time_point end) {
    const auto spun = std::chrono::steady_clock::now() + kSpin;
    for (int spins = 1;; ++spins) {
        const uint32_t found = other.turn.load(std::memory_order_acquire);
        if (arrived(found, turn)) return true;
        pause();
        if (spins % 64) continue;
        const auto now = std::chrono::steady_clock::now();
        if (now >= end) return false;
        if (now < spun) continue;
        other.sleepers.fetch_add(1, std::memory_order_seq_cst);  // either the giver sees a sleeper, or the sleeper the part
        if (other.turn.load(std::memory_order_seq_cst) == found) sleep_on(other.turn, found, end - now);
        other.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }
}

}  // namespace

size_t ranks_bytes(int parts, int64_t most) { return (size_t)parts * (kSeatBytes + 2 * (size_t)most * sizeof(float)); }

void ranks_give(void* memory, int parts, int64_t most, int rank, uint32_t turn, const float* part, int64_t count) {
    std::memcpy(buffer(memory, parts, most, rank, turn), part, (size_t)count * sizeof(float));
    Seat& mine = seat(memory, rank);
    mine.turn.store(turn, std::memory_order_seq_cst);
    if (mine.sleepers.load(std::memory_order_seq_cst) > 0) wake(mine.turn);
}

bool ranks_take(void* memory, int parts, int64_t most, uint32_t turn, float* out, int64_t count, int64_t micros) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(micros);
    for (int rank = 0; rank < parts; ++rank)
        if (!wait_for(seat(memory, rank), turn, end)) return false;
    const float* first = buffer(memory, parts, most, 0, turn);
    const float* second = buffer(memory, parts, most, 1, turn);
    for (int64_t i = 0; i < count; ++i) out[i] = first[i] + second[i];
    for (int rank = 2; rank < parts; ++rank) {
        const float* next = buffer(memory, parts, most, rank, turn);
        for (int64_t i = 0; i < count; ++i) out[i] += next[i];
    }
    return true;
}
