// Sums over the processes of one machine that share each layer's work (ranks), through memory that all of them map.
#pragma once
#include <cstddef>
#include <cstdint>

// Bytes of that memory, for `parts` ranks and sums of up to `most` floats. It must start as zeros.
size_t ranks_bytes(int parts, int64_t most);

// Lays this rank's part of sum number `turn` (1, 2, …) out for the others, and wakes those that wait for it.
void ranks_give(void* memory, int parts, int64_t most, int rank, uint32_t turn, const float* part, int64_t count);

// out = the parts of all ranks, added in the order of the ranks. False: a part was not there after so many microseconds;
// nothing was written, and the call may be made again.
bool ranks_take(void* memory, int parts, int64_t most, uint32_t turn, float* out, int64_t count, int64_t micros);
