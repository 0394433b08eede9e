// Which instruction sets this machine has, best first, and their kernels.
#pragma once
#include "kernels.h"

// The kernels called `name`; null where this machine or this build has none. "" or null: the best there is.
const Kernels* find_kernels(const char* name);

// The i-th usable set of kernels, best first; null past the last.
const Kernels* usable_kernels(int i);
