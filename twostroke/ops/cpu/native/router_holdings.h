// What the router knows of workers, and which of them have a prompt's blocks: a part of router.cpp.
#pragma once
#include "router.h"

#include <algorithm>
#include <limits>

namespace {

// ---- standing.py ---------------------------------------------------------------------------------------------------

constexpr int64_t kExact = 64, kStride = 16;
constexpr int kLengths = 3;

struct Worker;

struct HeldName {
    int32_t blocks = 0;   // that it stands for
    bool listed = false;  // every sixteenth name of a prompt: see HolderLists
};

// Where a worker stands among those of its kind, by the cost of prompts of one length.
struct RankPlace {
    int rank = 0;  // from 1; 0: none
    bool changed = false;
    Worker *before = nullptr, *after = nullptr;  // of the same rank
};

struct Worker {
    int32_t number;
    bool open = true;
    WorkerReport load;
    int64_t sent_tokens = 0, sent_streams = 0, streams = 0;
    double wait = 0, place = 0;
    NameTable<HeldName> held;  // names of its blocks
    NameOrder order;           // of these
    int64_t blocks = 0;
    RankPlace at[kLengths];

    Worker(int32_t number, const WorkerReport& report) : number(number) { this->report(report); }

    void report(const WorkerReport& given) {
        load = given;
        open = true;
        sent_tokens = sent_streams = 0;
        count();
    }

    void take(int64_t more_tokens, int64_t more_streams) {
        sent_tokens += more_tokens;
        sent_streams += more_streams;
        count();
    }

    void count() {
        streams = load.streams + sent_streams;
        wait = (double)(load.queued + sent_tokens) * load.token;
        const int64_t over = streams + 1 - load.max_streams;
        place = over > 0 ? (double)over * load.stream / (double)load.max_streams : 0;
    }

    bool has(Name name) { return held.find(name) != nullptr; }

    int64_t cached(const Names& names, int64_t guess = 0);
};

// Place in a prompt of the name that is kept as number `kept`.
int64_t place_of(int64_t kept) { return kept < kExact ? kept : kExact + (kept - kExact) * kStride; }

int64_t stands_for(int64_t place) {
    if (place < kExact) return 1;
    const int64_t after = (place - kExact) % kStride;
    return after ? after : kStride;
}

int64_t whole_strides(int64_t blocks) { return (blocks + kStride - 1) / kStride * kStride; }

int64_t Worker::cached(const Names& names, int64_t guess) {
    const int64_t count = names.count;
    if (!count || !has(names[0])) return 0;
    if (0 < guess && guess < kExact && guess <= count && has(names[guess - 1]) && (guess == count || !has(names[guess])))
        return guess;
    if (has(names[count - 1])) return count;
    int64_t low = 0, high = (count <= kExact ? count : kExact + (count - kExact + kStride - 1) / kStride) - 1;
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (has(names[place_of(middle)]))
            low = middle;
        else
            high = middle - 1;
    }
    const int64_t found = place_of(low);
    if (low < kExact) return found + 1;
    for (int64_t place = std::min(found + kStride, count) - 1; place > found; --place)
        if (has(names[place])) return place + 1;
    return found + 1;
}

// Puts one into a sorted list, after those that it does not come before.
template <class One, class Before> void insert_sorted(std::vector<One>& list, One one, Before before) {
    size_t place = list.size();
    while (place > 0 && before(one, list[place - 1])) --place;
    list.insert(list.begin() + (std::ptrdiff_t)place, one);
}

// ---- holdings.py ---------------------------------------------------------------------------------------------------

constexpr size_t kHolders = 3, kSample = 8;

// Numbers of the workers that have a name, in the order in which they got it. Most names have one.
class HolderLists {
  public:
    // The pointer holds until the next change.
    std::pair<const int32_t*, size_t> of(Name name) {
        const int32_t* one = firsts_.find(name);
        if (!one) return {nullptr, 0};
        if (*one >= 0) return {one, 1};
        const std::vector<int32_t>& list = lists_[(size_t)~*one];
        return {list.data(), list.size()};
    }

    void add(Name name, int32_t worker) {
        int32_t* one = firsts_.find(name);
        if (!one) {
            firsts_.put(name, worker);
            return;
        }
        if (*one >= 0) *one = ~new_list(*one);
        lists_[(size_t)~*one].push_back(worker);
    }

    void remove(Name name, int32_t worker) {
        const int32_t* one = firsts_.find(name);
        if (!one || (*one >= 0 && *one != worker)) return;
        if (*one < 0) {
            const int32_t number = ~*one;
            std::vector<int32_t>& list = lists_[(size_t)number];
            const auto place = std::find(list.begin(), list.end(), worker);
            if (place != list.end()) list.erase(place);
            if (!list.empty()) return;
            free_.push_back(number);
            std::vector<int32_t>().swap(list);
        }
        firsts_.remove(name);
    }

    void prefetch(Name name) const { firsts_.prefetch(name); }

  private:
    NameTable<int32_t> firsts_;  // the only worker; or, below 0, ~ the number of a list
    std::vector<std::vector<int32_t>> lists_;
    std::vector<int32_t> free_;

    int32_t new_list(int32_t worker) {
        if (free_.empty()) {
            lists_.push_back({worker});
            return (int32_t)lists_.size() - 1;
        }
        const int32_t number = free_.back();
        free_.pop_back();
        lists_[(size_t)number].push_back(worker);
        return number;
    }
};

class Holdings {
  public:
    void keep(Worker& worker, const Names& names, int64_t cached) {
        const int64_t count = names.count, next = whole_strides(cached);
        if (cached == count) return;
        expect(worker, names, cached);
        for (int64_t place = next; place < count; place += kStride)
            if (!worker.has(names[place])) holders_.add(names[place], worker.number);
        if (count > kExact) {
            add(worker, names, count - 1, stands_for(count - 1));
            const int64_t first = std::max(kExact, next), last = kExact + (count - 1 - kExact) / kStride * kStride;
            for (int64_t place = last; place >= first; place -= kStride) add(worker, names, place, kStride);
        }
        for (int64_t place = std::min(count, kExact) - 1; place >= cached; --place) add(worker, names, place, 1);
        const int64_t over = worker.blocks - worker.load.blocks;
        if (over > worker.load.blocks / 8) forget(worker, over);
    }

    // The oldest names that stand for so many blocks, or some more.
    void forget(Worker& worker, int64_t blocks) {
        constexpr size_t kAhead = 8;
        while (blocks > 0 && worker.order.size()) {
            if (worker.order.size() > kAhead) worker.held.prefetch(worker.order[kAhead]);
            const Name name = worker.order.take();
            const HeldName one = *worker.held.find(name);
            if (one.listed) holders_.remove(name, worker.number);
            worker.held.remove(name);
            worker.blocks -= one.blocks;
            blocks -= one.blocks;
        }
    }

    void drop(Worker& worker) { forget(worker, std::numeric_limits<int64_t>::max()); }

    // Numbers of workers that have the beginning of a prompt.
    template <class Wait> void most(const Names& names, const Wait& wait, std::vector<int32_t>& found) {
        found.clear();
        int64_t level = deepest(names);
        while (level >= 0 && found.size() < kHolders) {
            const auto [those, count] = holders_.of(names[level * kStride]);
            if (count > kHolders)
                sample(those, count, wait, found);
            else
                found.insert(found.end(), those, those + count);
            level = level ? level / 2 : -1;
        }
    }

  private:
    HolderLists holders_;
    uint64_t turn_ = 0;
    std::vector<int32_t> sampled_;

    static void add(Worker& worker, const Names& names, int64_t place, int64_t blocks) {
        if (!worker.held.put(names[place], {(int32_t)blocks, place % kStride == 0})) return;
        worker.order.add(names[place]);
        worker.blocks += blocks;
    }

    // Memory is slow: it is made at once, and asked for all that will be looked up.
    void expect(Worker& worker, const Names& names, int64_t cached) const {
        const int64_t exact = std::min(names.count, kExact), next = whole_strides(cached);
        const int64_t fresh = std::max<int64_t>(0, exact - cached) + std::max<int64_t>(0, names.count - next) / kStride + 1;
        worker.held.expect((size_t)fresh);
        worker.order.expect((size_t)fresh);
        for (int64_t place = cached; place < exact; ++place) worker.held.prefetch(names[place]);
        for (int64_t place = next; place < names.count; place += kStride) {
            worker.held.prefetch(names[place]);
            holders_.prefetch(names[place]);
        }
    }

    template <class Wait> void sample(const int32_t* those, size_t count, const Wait& wait, std::vector<int32_t>& found) {
        turn_ += kSample;
        const size_t first = (size_t)(turn_ % count), end = std::min(first + kSample, count);
        sampled_.clear();
        for (size_t i = first; i < end; ++i)
            insert_sorted(sampled_, those[i], [&](int32_t one, int32_t other) { return wait(one) < wait(other); });
        found.insert(found.end(), sampled_.begin(), sampled_.begin() + (std::ptrdiff_t)std::min(kHolders, end - first));
    }

    int64_t deepest(const Names& names) {
        int64_t low = -1, high = (names.count - 1) / kStride;
        while (low < high) {
            const int64_t middle = (low + high + 1) / 2;
            if (holders_.of(names[middle * kStride]).second)
                low = middle;
            else
                high = middle - 1;
        }
        return low;
    }
};

}  // namespace
