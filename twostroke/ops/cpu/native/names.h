// Names of KV blocks, 64 bits each, as the router knows them.
#pragma once
#include <algorithm>
#include <cstddef>
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
        expect(1);
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

    // So many are to come.
    void expect(size_t names) {
        size_t wanted = slots_.empty() ? kLeast : slots_.size();
        while (4 * (size_ + names) > 3 * wanted) wanted *= 2;
        if (wanted != slots_.size()) grow(wanted);
    }

    // It will be looked for soon.
    void prefetch(Name name) const {
        if (!slots_.empty()) __builtin_prefetch(&slots_[first_of(name)]);
    }

  private:
    struct Slot {
        Name name = 0;
        Value value = {};
    };
    static constexpr size_t kLeast = 8;
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

    // places: a power of two
    void grow(size_t places) {
        std::vector<Slot> before(places);
        before.swap(slots_);
        for (shift_ = 64; places > 1; places /= 2) --shift_;
        for (const Slot& slot : before)
            if (slot.name) slots_[place_of(slot.name)] = slot;
    }
};

// Names in the order in which they came.
class NameOrder {
  public:
    size_t size() const { return names_.size() - first_; }

    // 0: the oldest.
    Name operator[](size_t place) const { return names_[first_ + place]; }

    void add(Name name) { names_.push_back(name); }

    // The oldest, which goes.
    Name take() {
        const Name name = names_[first_++];
        if (2 * first_ > names_.size()) {
            names_.erase(names_.begin(), names_.begin() + (std::ptrdiff_t)first_);
            first_ = 0;
        }
        return name;
    }

    void expect(size_t names) {
        if (names_.size() + names > names_.capacity()) names_.reserve(std::max(names_.size() + names, 2 * names_.size()));
    }

  private:
    std::vector<Name> names_;
    size_t first_ = 0;  // those before it are gone
};
