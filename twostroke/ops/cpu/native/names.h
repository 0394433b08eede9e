// Names of KV blocks, 64 bits each, as the router knows them.
#pragma once
#include <cstdint>
#include <cstring>
#include <vector>

using Name = uint64_t;  // never 0

// The names of a prompt's full blocks, in order: 8 bytes each.
struct Names {
    const char* bytes;
    int64_t count;

    Name operator[](int64_t place) const {
        Name name;
        std::memcpy(&name, bytes + place * (int64_t)sizeof name, sizeof name);
        return name ? name : 1;
    }
};

// A number for each of many names: open addressing, at most three quarters full.
template <class Value> class NameTable {
  public:
    size_t size() const { return size_; }

    // Null: the name is not there.
    Value* find(Name name) {
        if (slots_.empty()) return nullptr;
        Slot& slot = slots_[place_of(name)];
        return slot.name ? &slot.value : nullptr;
    }

    // True: it is new.
    bool put(Name name, Value value) {
        if (4 * (size_ + 1) > 3 * slots_.size()) grow();
        Slot& slot = slots_[place_of(name)];
        const bool fresh = !slot.name;
        slot = {name, value};
        size_ += fresh;
        return fresh;
    }

    void remove(Name name) {
        if (!find(name)) return;
        --size_;
        size_t gap = place_of(name);
        for (size_t next = gap;;) {
            next = (next + 1) & mask();
            if (!slots_[next].name) break;
            // A name moves into the gap if the gap is not before the place where a search for it begins.
            if (((next - first_of(slots_[next].name)) & mask()) < ((next - gap) & mask())) continue;
            slots_[gap] = slots_[next];
            gap = next;
        }
        slots_[gap] = {};
    }

    // It will be looked for soon.
    void expect(Name name) const {
        if (!slots_.empty()) __builtin_prefetch(&slots_[first_of(name)]);
    }

  private:
    struct Slot {
        Name name = 0;
        Value value = {};
    };
    std::vector<Slot> slots_;
    size_t size_ = 0;
    int shift_ = 64;  // 64 less the bits of a place

    size_t mask() const { return slots_.size() - 1; }

    size_t first_of(Name name) const { return (size_t)(name * 0x9E3779B97F4A7C15u >> shift_); }

    // Where the name is, or would be.
    size_t place_of(Name name) const {
        size_t place = first_of(name);
        while (slots_[place].name && slots_[place].name != name) place = (place + 1) & mask();
        return place;
    }

    void grow() {
        std::vector<Slot> before(slots_.empty() ? 8 : 2 * slots_.size());
        before.swap(slots_);
        shift_ = before.empty() ? 61 : shift_ - 1;
        for (const Slot& slot : before)
            if (slot.name) slots_[place_of(slot.name)] = slot;
    }
};
