// What one backend object owns: its kernels, its threads, buffers that are reused from call to call.
#pragma once
#include <stdlib.h>

#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "cpu.h"
#include "pool.h"

// Memory aligned to cache lines that only grows.
class Buffer {
public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { free(data_); }

    template <class T> T* get(size_t count) {
        const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
        if (bytes > size_) {
            free(data_);
            data_ = nullptr, size_ = 0;
            if (posix_memalign(&data_, 64, bytes + bytes / 4 / 64 * 64) != 0) throw std::bad_alloc();
            size_ = bytes + bytes / 4 / 64 * 64;
        }
        return static_cast<T*>(data_);
    }

private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

// A stretch of memory that many weights share. Large pages need large stretches, and a step reads every byte of the
// weights once: with small pages, finding the pages would cost as much as reading them.
class Arena {
public:
    explicit Arena(size_t bytes);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    uint8_t* take(size_t bytes);  // null when the rest is too small

private:
    void* mapped_;
    size_t mapped_bytes_;
    uint8_t* next_;
    uint8_t* end_;
};

// A packed matrix: parts stacked along the output, each in the kind that suits its format.
struct Part {
    int kind, rows, panels;
    int output;          // first output of this part
    uint8_t* data;
    size_t panel_stride;
};

struct Weight {
    int rows = 0, cols = 0, panels = 0;
    bool coded = false, floats = false;  // which forms of the input the parts multiply with
    size_t bytes = 0;
    std::vector<Part> parts;
    std::vector<float> bias;
    std::vector<int32_t> order;  // not empty: column k of the panels is input order[k]
    std::shared_ptr<Arena> arena;
};

// Rows [first, first + rows) of an input, and what they are multiplied with.
struct RowGroup {
    const Weight* weight;
    int first, rows;
};

// A product that is ready to start once its input is made: see linear.cpp.
struct ReadyProduct {
    PrologueArgs before;
    MatmulArgs product;
};

struct ProductTask {
    int group, from, to;  // rows or panels
};

struct Context {
    const Kernels& kernels;
    Pool pool;
    std::mutex mutex;  // one call at a time: the buffers below are its own
    Buffer acts, plain, q, partials;
    Buffer qkv, attended, gate_up, product;  // between the ops of a layer
    Buffer normed, total, ordered;
    Buffer choice, pairs;                    // of experts
    Buffer decode_rows, decode_lengths, decode_slots, decode_tables, decode_x;  // of decode.cpp
    std::vector<int> starts;                 // where an expert's rows start
    std::vector<RowGroup> row_groups;
    std::vector<ReadyProduct> ready;
    std::vector<ProductTask> product_tasks;
    std::vector<std::unique_ptr<Buffer>> scratch;  // one for each thread
    std::vector<AttendTask> tasks;
    std::vector<int> expected;  // for each thread, the task that it asked memory for
    std::shared_ptr<Arena> arena;  // the one that still has room
    std::shared_ptr<void> encoding;  // what encode.cpp keeps between its ops

    Context(const Kernels& k, int threads) : kernels(k), pool(threads) {
        for (int i = 0; i < pool.threads(); ++i) scratch.push_back(std::make_unique<Buffer>());
    }

    // Grown before a job starts, so that threads only read the pointer.
    void reserve_scratch(size_t bytes) {
        for (auto& buffer : scratch) buffer->get<uint8_t>(bytes);
    }
    uint8_t* scratch_of(int worker) { return scratch[worker]->get<uint8_t>(0); }
};
