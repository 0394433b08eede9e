#include "cpu.h"

#include <string.h>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

extern const Kernels kernels_portable;

#if defined(__x86_64__)
extern const Kernels kernels_amx, kernels_avx512, kernels_avx2;

// __builtin_cpu_supports also asks whether the system saves the wide registers.
static bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}
// Tiles are large, so Linux saves them only for a process that asked for them.
static bool has_amx() {
#if defined(__linux__)
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool tiles = d >> 24 & 1, bytes = d >> 25 & 1, bfloats = d >> 22 & 1;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return tiles && bytes && bfloats && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}
static bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

#elif defined(__aarch64__)
extern const Kernels kernels_i8mm, kernels_neon;

#if defined(__APPLE__)
static bool system_says(const char* name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
static bool has_dot_product() { return system_says("hw.optional.arm.FEAT_DotProd") && system_says("hw.optional.arm.FEAT_FP16"); }
static bool has_matrix_product() { return system_says("hw.optional.arm.FEAT_I8MM"); }
#elif defined(__linux__)
static bool has_dot_product() { return getauxval(AT_HWCAP) >> 20 & getauxval(AT_HWCAP) >> 10 & 1; }  // HWCAP_ASIMDDP, HWCAP_ASIMDHP
static bool has_matrix_product() { return getauxval(AT_HWCAP2) >> 13 & 1; }  // HWCAP2_I8MM
#else
static bool has_dot_product() { return false; }
static bool has_matrix_product() { return false; }
#endif
#endif

const Kernels* usable_kernels(int i) {
    static const Kernels* found[5] = {nullptr};
    static const int count = [] {
        int n = 0;
#if defined(__x86_64__)
        __builtin_cpu_init();
        if (has_avx512() && has_amx()) found[n++] = &kernels_amx;
        if (has_avx512()) found[n++] = &kernels_avx512;
        if (has_avx2()) found[n++] = &kernels_avx2;
#elif defined(__aarch64__)
        if (has_dot_product() && has_matrix_product()) found[n++] = &kernels_i8mm;
        if (has_dot_product()) found[n++] = &kernels_neon;
#endif
        found[n++] = &kernels_portable;
        return n;
    }();
    return i >= 0 && i < count ? found[i] : nullptr;
}

const Kernels* find_kernels(const char* name) {
    if (!name || !*name) return usable_kernels(0);
    for (int i = 0; const Kernels* k = usable_kernels(i); ++i)
        if (strcmp(k->name, name) == 0) return k;
    return nullptr;
}
