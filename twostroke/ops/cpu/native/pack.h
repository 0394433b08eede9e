// GGUF blocks -> packed panels, and single rows back out of them. Layouts: layout.h.
#pragma once
#include "layout.h"

// Bytes of one row of `cols` elements in a GGUF format; 0 where cols is not whole blocks.
size_t stored_row_bytes(int format, size_t cols);

// Panels [panel, panel_end) of a (rows, cols) matrix whose rows lie adjacent at `data`.
void pack_panels(int format, bool wide, const uint8_t* data, int rows, int cols, int panel, int panel_end, uint8_t* out);

// One row of packed panels as floats, bit for bit what the format defines.
void unpack_row(int kind, bool wide, const uint8_t* panels, int row, int cols, float* out);
