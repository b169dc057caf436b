// Products in float32 with weights of 16 bits (bfloat16), 8 or 4 bits: each is widened on its way into the sum, exactly.
//
// What a checkpoint holds in few bits is read in few bits, and a result has the very bits that full.h gives for the widened weights:
// number * step has at most 19 significant bits, so that one fused multiply-add rounds number * step + least as two steps do, and the
// sums go the same way. The layouts are those of the quantised products; inputs are a multiple of 32.
//
// Included in quantized.cpp, after what it builds on.

#pragma once

namespace {

#define AVX512 __attribute__((target("avx512f,avx2,fma,f16c")))

// Bytes of 32 inputs of 16 outputs without their ranges, and of the ranges before a group.
constexpr int64_t piece_bytes(int bits) { return GROUP * BLOCK * bits / 8; }
constexpr int64_t range_bytes(int bits) { return bits == 4 ? 64 : bits == 8 ? 32 : 0; }

int64_t block_bytes(const Weights& w) {
    return w.padded_inputs / GROUP * piece_bytes(w.bits) + w.padded_inputs / w.group * range_bytes(w.bits);
}

// The j-th four inputs of 32 for 16 outputs.
template <int BITS>
AVX512 inline void four_wide(const uint8_t* piece, int j, __m512 step, __m512 least, __m512 v[4]) {
    if (BITS == 16) {
        for (int i = 0; i < 4; i++) {
            __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(piece + (j * 4 + i) * 32));
            v[i] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
        }
        return;
    }
    if (BITS == 8) {
        __m512i n = _mm512_loadu_si512(piece + j * 64);
        for (int i = 0; i < 4; i++) {
            __m512i number = _mm512_srai_epi32(_mm512_sllv_epi32(n, _mm512_set1_epi32(24 - 8 * i)), 24);
            v[i] = _mm512_mul_ps(_mm512_cvtepi32_ps(number), step);
        }
        return;
    }
    __m512i n = _mm512_loadu_si512(piece + j % 4 * 64);
    for (int i = 0; i < 4; i++) {
        __m512i number = _mm512_srlv_epi32(n, _mm512_set1_epi32(8 * i + j / 4 * 4));
        v[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_and_si512(number, _mm512_set1_epi32(15))), step, least);
    }
}

// The same for the first or second 8 of the 16 outputs.
template <int BITS>
AVX2 inline void four_narrow(const uint8_t* piece, int j, int64_t half, __m256 step, __m256 least, __m256 v[4]) {
    if (BITS == 16) {
        for (int i = 0; i < 4; i++) {
            __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(piece + (j * 4 + i) * 32 + half * 16));
            v[i] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(some), 16));
        }
        return;
    }
    __m256i n = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(piece + (BITS == 8 ? j : j % 4) * 64 + half * 32));
    for (int i = 0; i < 4; i++) {
        if (BITS == 8) {
            __m256i number = _mm256_srai_epi32(_mm256_sllv_epi32(n, _mm256_set1_epi32(24 - 8 * i)), 24);
            v[i] = _mm256_mul_ps(_mm256_cvtepi32_ps(number), step);
        } else {
            __m256i number = _mm256_srlv_epi32(n, _mm256_set1_epi32(8 * i + j / 4 * 4));
            v[i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_and_si256(number, _mm256_set1_epi32(15))), step, least);
        }
    }
}

constexpr int DIRECT = 3;  // so many rows take widened weights from registers, more from the nearest cache, where each is read for all

template <int BITS>
inline void fetch_four(const uint8_t* piece, int j) {
    if (BITS == 16) fetch(piece + j * 128 + 64);
    if (BITS != 4 || j < 4) fetch(piece + j * (BITS == 16 ? 128 : 64));
}

AVX512 inline __m512 range_wide(const uint8_t* at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

AVX2 inline __m256 range_narrow(const uint8_t* at) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))); }

// Whole least values times a step have at most 15 significant bits: exact, too.
AVX512 inline __m512 least_wide(const Weights& w, const uint8_t* at, __m512 step) {
    __m512 least = range_wide(at);
    return w.in_steps ? _mm512_mul_ps(least, step) : least;
}

AVX2 inline __m256 least_narrow(const Weights& w, const uint8_t* at, __m256 step) {
    __m256 least = range_narrow(at);
    return w.in_steps ? _mm256_mul_ps(least, step) : least;
}

// R rows by 16 x B outputs, whose blocks lie `size` bytes apart.
template <int BITS, int R, int B>
AVX512 void exact_wide(const Weights& weights, const uint8_t* w, int64_t size, const float* x, int64_t stride, float* sums) {
    __m512 f[R][B], step[B], least[B], wide[B][GROUP];
    for (int b = 0; b < B; b++) {
        step[b] = least[b] = _mm512_setzero_ps();
        for (int r = 0; r < R; r++) f[r][b] = _mm512_setzero_ps();
    }
    int64_t per_group = weights.group / GROUP;
    for (int64_t g = 0; g < weights.inputs / GROUP; g++, w += piece_bytes(BITS), x += GROUP) {
        if (BITS != 16 && g % per_group == 0) {
            for (int b = 0; b < B; b++) {
                step[b] = range_wide(w + b * size);
                if (BITS == 4) least[b] = least_wide(weights, w + b * size + 32, step[b]);
            }
            w += range_bytes(BITS);
        }
        if (R <= DIRECT) {
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++)
                for (int b = 0; b < B; b++) {
                    __m512 v[4];
                    four_wide<BITS>(w + b * size, j, step[b], least[b], v);
                    fetch_four<BITS>(w + b * size, j);
                    for (int i = 0; i < 4; i++)
                        for (int r = 0; r < R; r++)
                            f[r][b] = _mm512_fmadd_ps(v[i], _mm512_set1_ps(x[r * stride + j * 4 + i]), f[r][b]);
                }
            continue;
        }
        for (int b = 0; b < B; b++)
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) {
                four_wide<BITS>(w + b * size, j, step[b], least[b], wide[b] + j * 4);
                fetch_four<BITS>(w + b * size, j);
            }
        for (int k = 0; k < GROUP; k++)
            for (int r = 0; r < R; r++) {
                __m512 a = _mm512_set1_ps(x[r * stride + k]);
                for (int b = 0; b < B; b++) f[r][b] = _mm512_fmadd_ps(wide[b][k], a, f[r][b]);
            }
    }
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) _mm512_storeu_ps(sums + (r * B + b) * BLOCK, f[r][b]);
}

// R rows by 16 outputs.
template <int BITS, int R>
AVX2 void exact_narrow(const Weights& weights, const uint8_t* w, int64_t, const float* x, int64_t stride, float* sums) {
    int64_t per_group = weights.group / GROUP;
    for (int64_t half = 0; half < 2; half++) {
        const uint8_t* piece = w;
        __m256 f[R], step = _mm256_setzero_ps(), least = step;
        for (int r = 0; r < R; r++) f[r] = _mm256_setzero_ps();
        for (int64_t g = 0; g < weights.inputs / GROUP; g++, piece += piece_bytes(BITS)) {
            if (BITS != 16 && g % per_group == 0) {
                step = range_narrow(piece + half * 16);
                if (BITS == 4) least = least_narrow(weights, piece + 32 + half * 16, step);
                piece += range_bytes(BITS);
            }
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) {
                __m256 v[4];
                four_narrow<BITS>(piece, j, half, step, least, v);
                if (!half) fetch(piece + j * piece_bytes(BITS) / 8);
                for (int i = 0; i < 4; i++)
                    for (int r = 0; r < R; r++)
                        f[r] = _mm256_fmadd_ps(v[i], _mm256_set1_ps(x[r * stride + g * GROUP + j * 4 + i]), f[r]);
            }
        }
        for (int r = 0; r < R; r++) _mm256_storeu_ps(sums + r * BLOCK + half * 8, f[r]);
    }
}

using ExactKernel = void (*)(const Weights&, const uint8_t*, int64_t, const float*, int64_t, float*);

template <int BITS>
ExactKernel exact_kernel(bool wide, int64_t rows) {
    static constexpr ExactKernel WIDES[] = {exact_wide<BITS, 1, 2>,  exact_wide<BITS, 2, 2>,  exact_wide<BITS, 3, 2>, exact_wide<BITS, 4, 2>,
                                            exact_wide<BITS, 5, 2>,  exact_wide<BITS, 6, 2>,  exact_wide<BITS, 7, 2>, exact_wide<BITS, 8, 2>,
                                            exact_wide<BITS, 9, 2>,  exact_wide<BITS, 10, 2>, exact_wide<BITS, 11, 2>, exact_wide<BITS, 12, 2>};
    static constexpr ExactKernel NARROWS[] = {exact_narrow<BITS, 1>, exact_narrow<BITS, 2>, exact_narrow<BITS, 3>,
                                              exact_narrow<BITS, 4>, exact_narrow<BITS, 5>, exact_narrow<BITS, 6>};
    return (wide ? WIDES : NARROWS)[rows - 1];
}

// One block as full.h wants it: [inputs, 16] floats.
template <int BITS>
AVX2 void widen_block(const Weights& weights, const uint8_t* piece, float* out) {
    int64_t per_group = weights.group / GROUP;
    __m256 step[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()}, least[2] = {step[0], step[0]};
    for (int64_t g = 0; g < weights.inputs / GROUP; g++, piece += piece_bytes(BITS)) {
        if (BITS != 16 && g % per_group == 0) {
            for (int half = 0; half < 2; half++) {
                step[half] = range_narrow(piece + half * 16);
                if (BITS == 4) least[half] = least_narrow(weights, piece + 32 + half * 16, step[half]);
            }
            piece += range_bytes(BITS);
        }
        for (int j = 0; j < 8; j++)
            for (int half = 0; half < 2; half++) {
                __m256 v[4];
                four_narrow<BITS>(piece, j, half, step[half], least[half], v);
                for (int i = 0; i < 4; i++) _mm256_storeu_ps(out + (g * GROUP + j * 4 + i) * BLOCK + half * 8, v[i]);
            }
    }
}

// Floats that a thread needs to widen two blocks.
int64_t widening_room(const Weights& w) { return w.bits == 32 ? 0 : 2 * BLOCK * w.inputs; }

constexpr int64_t PASSES = 3;  // more passes over the same weights find them widened once for all, in `room`

template <int BITS>
void multiply_exact(bool wide, const float* x, int64_t stride, int64_t rows, const Output& out, int64_t begin, int64_t end, float* room) {
    const Weights& w = out.w;
    int64_t size = block_bytes(w), most = cut(wide, rows).rows, together = wide ? 2 : 1;
    float sums[12 * 2 * BLOCK];
    for (int64_t block = begin; block < end;) {
        const uint8_t* at = w.packed + block * size;
        int64_t blocks = std::min(together, end - block);
        if (rows <= most * PASSES && blocks == together) {
            for (int64_t row = 0; row < rows; row += most) {
                int64_t now = std::min(most, rows - row);
                exact_kernel<BITS>(wide, now)(w, at, size, x + row * stride, stride, sums);
                for (int64_t r = 0; r < now; r++) finish(out, row + r, block * BLOCK, blocks * BLOCK, sums + r * blocks * BLOCK);
            }
        } else {
            for (int64_t b = 0; b < blocks; b++) widen_block<BITS>(w, at + b * size, room + b * BLOCK * w.inputs);
            multiply_floats(wide, room, x, stride, rows, out, block, blocks);
        }
        block += blocks;
    }
}

}  // namespace
