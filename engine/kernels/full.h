// Products with float32 weights, for few rows: each weight is read once for up to twelve of them.
//
// Weights lie in blocks of 16 outputs: for every input 16 floats. Sums go over the inputs in their order, one accumulator for each
// result, so that a row's result does not depend on the other rows.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

namespace {

constexpr int64_t AHEAD = 1024;  // bytes that weights are fetched ahead of their use: memory keeps nobody waiting then

inline void fetch(const void* at) { _mm_prefetch(static_cast<const char*>(at) + AHEAD, _MM_HINT_T0); }

// R rows by 16 x B outputs.
template <int R, int B>
__attribute__((target("avx512f"))) void full_wide(const float* w, int64_t inputs, const float* x, int64_t stride, float* sums) {
    __m512 f[R][B];
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) f[r][b] = _mm512_setzero_ps();
    int64_t block = inputs * 16;
    for (int64_t k = 0; k < inputs; k++) {
        __m512 v[B];
        for (int b = 0; b < B; b++) {
            v[b] = _mm512_loadu_ps(w + b * block + k * 16);
            fetch(w + b * block + k * 16);
        }
        for (int r = 0; r < R; r++) {
            __m512 a = _mm512_set1_ps(x[r * stride + k]);
            for (int b = 0; b < B; b++) f[r][b] = _mm512_fmadd_ps(v[b], a, f[r][b]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) _mm512_storeu_ps(sums + (r * B + b) * 16, f[r][b]);
}

// R rows by 16 outputs.
template <int R>
__attribute__((target("avx2,fma"))) void full_narrow(const float* w, int64_t inputs, const float* x, int64_t stride, float* sums) {
    __m256 low[R], high[R];
    for (int r = 0; r < R; r++) low[r] = high[r] = _mm256_setzero_ps();
    for (int64_t k = 0; k < inputs; k++) {
        __m256 a = _mm256_loadu_ps(w + k * 16), b = _mm256_loadu_ps(w + k * 16 + 8);
        fetch(w + k * 16);
        for (int r = 0; r < R; r++) {
            __m256 v = _mm256_set1_ps(x[r * stride + k]);
            low[r] = _mm256_fmadd_ps(a, v, low[r]);
            high[r] = _mm256_fmadd_ps(b, v, high[r]);
        }
    }
    for (int r = 0; r < R; r++) {
        _mm256_storeu_ps(sums + r * 16, low[r]);
        _mm256_storeu_ps(sums + r * 16 + 8, high[r]);
    }
}

using FullKernel = void (*)(const float*, int64_t, const float*, int64_t, float*);
constexpr FullKernel FOUR_BLOCKS[] = {full_wide<1, 4>, full_wide<2, 4>, full_wide<3, 4>, full_wide<4, 4>, full_wide<5, 4>, full_wide<6, 4>};
constexpr FullKernel TWO_BLOCKS[] = {full_wide<1, 2>, full_wide<2, 2>, full_wide<3, 2>, full_wide<4, 2>,  full_wide<5, 2>,  full_wide<6, 2>,
                                     full_wide<7, 2>, full_wide<8, 2>, full_wide<9, 2>, full_wide<10, 2>, full_wide<11, 2>, full_wide<12, 2>};
constexpr FullKernel ONE_BLOCK[] = {full_wide<1, 1>, full_wide<2, 1>, full_wide<3, 1>, full_wide<4, 1>,  full_wide<5, 1>,  full_wide<6, 1>,
                                    full_wide<7, 1>, full_wide<8, 1>, full_wide<9, 1>, full_wide<10, 1>, full_wide<11, 1>, full_wide<12, 1>};
constexpr FullKernel NARROW[] = {full_narrow<1>, full_narrow<2>, full_narrow<3>, full_narrow<4>, full_narrow<5>, full_narrow<6>};

// How rows and blocks of outputs are cut up: `rows` at most in one pass over `blocks`.
struct Cut {
    int64_t rows, blocks;
};

// Rows in equal parts; where they are few, more outputs at once keep more additions under way.
inline Cut cut(bool wide, int64_t rows) {
    int64_t most = wide ? 12 : 6;
    int64_t passes = (rows + most - 1) / most;
    int64_t now = (rows + passes - 1) / std::max<int64_t>(passes, 1);
    return {now, !wide ? 1 : now <= 6 ? 4 : 2};
}

inline FullKernel full_kernel(bool wide, int64_t rows, int64_t blocks) {
    if (!wide) return NARROW[rows - 1];
    return blocks == 4 ? FOUR_BLOCKS[rows - 1] : blocks == 2 ? TWO_BLOCKS[rows - 1] : ONE_BLOCK[rows - 1];
}

}  // namespace
