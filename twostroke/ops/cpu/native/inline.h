// Kernels must melt into one loop whose values stay in registers: say so to the compiler. TS_SLOW leaves it alone, for
// builds with sanitizers, which would take many minutes otherwise.
#pragma once
#if defined(TS_SLOW)
#define TS_INLINE static inline
#define TS_MEMBER inline
#define TS_UNROLL
#else
#define TS_INLINE static inline __attribute__((always_inline))
#define TS_MEMBER inline __attribute__((always_inline))
#if defined(__clang__)
#define TS_UNROLL _Pragma("unroll")
#else
#define TS_UNROLL _Pragma("GCC unroll 16")
#endif
#endif
