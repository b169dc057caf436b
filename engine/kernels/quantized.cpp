// Products with weights on x86-64, 8 bits (a scale a group), 4 bits (a scale and a least value a group), float32 (full.h) and what
// is widened to float32 exactly (exact.h), attention of single tokens over the paged cache, and all layers of a step in one call (step.h).
//
// In the quantised products activations are quantised on the way in: 32 neighbours share one scale, so that an outlier spoils only its own group.
// Sums within a group are whole numbers, sums over groups are floats in the order of the inputs: a row's result depends
// neither on the other rows, nor on the number of threads, and only by rounding on the instructions that are there.
//
// Weights lie in blocks of 16 outputs. A block holds, for every four inputs, 16 x 4 bytes: one 512-bit or two 256-bit loads.
// Before each group stand its 16 scales (float16), and with 4 bits 16 least values, as such or counted in scales. 4-bit groups
// then have 256 bytes for every 32 inputs: byte i has weight i of the 8-bit order in its low half and i + 256 in its high half.

#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

#include "full.h"
#include "team.h"

#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))

namespace {

constexpr int GROUP = 32;
constexpr int BLOCK = 16;
enum Level { NONE = 0, WITH_AVX2 = 1, WITH_VNNI = 2 };

}  // namespace

extern "C" {

struct Weights {
    const uint8_t* packed;
    const float* bias;  // [outputs] or null
    int64_t inputs;
    int64_t padded_inputs;  // multiple of the group
    int64_t outputs;
    int64_t group;  // multiple of 32
    int64_t bits;   // 4, 8, 16 (bfloat16) or 32 (float32)
    int64_t exact;  // activations stay float32: always so with 16 and 32 bits
    int64_t in_steps;  // with 4 bits: least values are counted in scales
};
}

namespace {

// What a product reads. Rows lie `stride` numbers apart. norm: RMS norm with these weights first.
// gated: a row is gate and up, each of `inputs` numbers, and silu(gate) * up is what goes in.
struct Input {
    const float* x;
    int64_t rows;
    int64_t stride;
    const float* norm;
    double eps;
    int64_t gated;
};

// A quantised input: whole numbers -127..127; per group of 32 the scale, -128 times the sum of the numbers, and scale times sum.
struct Quantised {
    int8_t* numbers;
    float* scale;
    int32_t* offset;
    float* weighted;
    int64_t inputs;  // padded
    int64_t groups;
};

struct Memory {
    std::unique_ptr<char[]> bytes;
    size_t size = 0;
    char* at_least(size_t wanted) {
        if (size < wanted) {
            bytes.reset(new char[wanted + 64]);
            size = wanted;
        }
        return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(bytes.get()) + 63) & ~uintptr_t(63));
    }
};

size_t quantised_bytes(int64_t rows, int64_t padded) { return size_t(rows) * (padded + padded / GROUP * 12); }

Quantised place(char* memory, int64_t rows, int64_t padded) {
    int64_t groups = padded / GROUP;
    auto* scale = reinterpret_cast<float*>(memory);
    auto* offset = reinterpret_cast<int32_t*>(scale + rows * groups);
    auto* weighted = reinterpret_cast<float*>(offset + rows * groups);
    return {reinterpret_cast<int8_t*>(weighted + rows * groups), scale, offset, weighted, padded, groups};
}

// e^x: x = n ln 2 + r, |r| <= ln 2 / 2, e^r by its series to r^7 (error below one part in 2^26), times 2^n.
AVX2 inline __m256 exponential(__m256 x) {
    x = _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(-87.3f)), _mm256_set1_ps(88.3f));
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693145752f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(1.42860677e-6f), r);
    __m256 y = _mm256_set1_ps(1.f / 5040);
    for (float c : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f}) y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(c));
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(y, _mm256_castsi256_ps(power));
}

AVX2 inline float total(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

AVX2 inline float largest(__m256 v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

AVX2 float norm_factor(const float* x, int64_t n, double eps) {
    __m256 squares = _mm256_setzero_ps();
    int64_t k = 0;
    for (; k + 8 <= n; k += 8) {
        __m256 v = _mm256_loadu_ps(x + k);
        squares = _mm256_fmadd_ps(v, v, squares);
    }
    float sum = total(squares);
    for (; k < n; k++) sum += x[k] * x[k];
    return float(1.0 / std::sqrt(sum / double(n) + eps));
}

// 32 numbers in `v` (eight at a time) to whole numbers.
AVX2 inline void quantise_group(const __m256 v[4], const Quantised& out, int64_t row, int64_t group) {
    const __m256 plus = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256 most = _mm256_setzero_ps();
    for (int i = 0; i < 4; i++) most = _mm256_max_ps(most, _mm256_and_ps(v[i], plus));
    float top = largest(most);
    __m256 inverse = _mm256_set1_ps(top > 0 ? 127.f / top : 0.f);
    __m256i q[4];
    for (int i = 0; i < 4; i++) q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
    __m256i sums = _mm256_add_epi32(_mm256_add_epi32(q[0], q[1]), _mm256_add_epi32(q[2], q[3]));
    __m256i low = _mm256_packs_epi32(q[0], q[1]), high = _mm256_packs_epi32(q[2], q[3]);
    __m256i mixed = _mm256_packs_epi16(low, high);
    __m256i ordered = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.numbers + row * out.inputs + group * GROUP), ordered);
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    s = _mm_add_epi32(s, _mm_unpackhi_epi64(s, s));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 1));
    int32_t sum = _mm_cvtsi128_si32(s);
    int64_t at = row * out.groups + group;
    out.scale[at] = top / 127.f;
    out.offset[at] = -128 * sum;
    out.weighted[at] = top / 127.f * float(sum);
}

AVX2 void quantise(const Input& in, int64_t inputs, const Quantised& out, int64_t row) {
    const float* x = in.x + row * in.stride;
    float factor = in.norm ? norm_factor(x, inputs, in.eps) : 1.f;
    for (int64_t group = 0; group < out.groups; group++) {
        int64_t k = group * GROUP, there = std::min<int64_t>(GROUP, inputs - k);
        float first[GROUP] = {}, second[GROUP] = {};
        const float *a = x + k, *b = in.norm ? in.norm + k : in.gated ? x + inputs + k : nullptr;
        if (there < GROUP) {  // the last group of inputs that are no multiple of 32; in padding beyond it there is nothing
            if (there > 0) std::memcpy(first, a, there * sizeof(float));
            if (there > 0 && b) std::memcpy(second, b, there * sizeof(float));
            a = first, b = b ? second : nullptr;
        }
        __m256 v[4];
        for (int i = 0; i < 4; i++) {
            v[i] = _mm256_loadu_ps(a + 8 * i);
            if (in.norm) {
                v[i] = _mm256_mul_ps(_mm256_mul_ps(v[i], _mm256_set1_ps(factor)), _mm256_loadu_ps(b + 8 * i));
            } else if (in.gated) {
                __m256 below = _mm256_add_ps(_mm256_set1_ps(1.f), exponential(_mm256_sub_ps(_mm256_setzero_ps(), v[i])));
                v[i] = _mm256_mul_ps(_mm256_div_ps(v[i], below), _mm256_loadu_ps(b + 8 * i));
            }
        }
        quantise_group(v, out, row, group);
    }
}

// Where a tile of results goes: R rows from `row`, outputs from `column`; adds the bias and what `residual` holds.
struct Output {
    const Weights& w;
    const float* residual;  // [rows, outputs] or null; may be y
    float* y;
};

AVX2 void finish(const Output& out, int64_t row, int64_t column, int64_t width, const float* sums) {
    width = std::min(width, out.w.outputs - column);
    float* y = out.y + row * out.w.outputs + column;
    const float* more = out.residual ? out.residual + row * out.w.outputs + column : nullptr;
    int64_t i = 0;
    for (; i + 8 <= width; i += 8) {
        __m256 value = _mm256_loadu_ps(sums + i);
        if (out.w.bias) value = _mm256_add_ps(value, _mm256_loadu_ps(out.w.bias + column + i));
        if (more) value = _mm256_add_ps(value, _mm256_loadu_ps(more + i));
        _mm256_storeu_ps(y + i, value);
    }
    for (; i < width; i++) {
        float value = out.w.bias ? sums[i] + out.w.bias[column + i] : sums[i];
        y[i] = more ? value + more[i] : value;
    }
}

inline int32_t four(const int8_t* at) {
    int32_t value;
    std::memcpy(&value, at, 4);
    return value;
}

// -- AVX2: R rows by 8 outputs ------------------------------------------------------------------------------------------

// Weights as their absolute values (0..127) times activations with the weights' signs: pairs fit into 16 bits.
template <int R>
AVX2 void tile8_avx2(const uint8_t* block, int64_t half, const Quantised& in, int64_t group, int64_t row, float sums[R][8]) {
    __m256 f[R];
    for (int r = 0; r < R; r++) f[r] = _mm256_setzero_ps();
    const __m256i ones = _mm256_set1_epi16(1);
    int64_t per_group = group / GROUP;
    __m256 wide = _mm256_setzero_ps();
    for (int64_t g = 0; g < in.groups; g++) {
        if (g % per_group == 0) {
            wide = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block + half * 16)));
            block += 32;
        }
        __m256i sum[R];
        for (int r = 0; r < R; r++) sum[r] = _mm256_setzero_si256();
        for (int j = 0; j < 8; j++, block += 64) {
            __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + half * 32));
            __m256i size = _mm256_abs_epi8(w);
            if (!half) fetch(block);
            for (int r = 0; r < R; r++) {
                __m256i a = _mm256_set1_epi32(four(in.numbers + (row + r) * in.inputs + g * GROUP + j * 4));
                __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(a, w));
                sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(pairs, ones));
            }
        }
        for (int r = 0; r < R; r++) {
            __m256 scale = _mm256_mul_ps(wide, _mm256_set1_ps(in.scale[(row + r) * in.groups + g]));
            f[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r]), scale, f[r]);
        }
    }
    for (int r = 0; r < R; r++) _mm256_storeu_ps(sums[r], f[r]);
}

// Weights are 0..15: eight products of pairs (at most 8 x 2 x 15 x 127) fit into 16 bits before they must be widened.
template <int R>
AVX2 void tile4_avx2(const uint8_t* block, int64_t half, const Quantised& in, const Weights& w, int64_t row, float sums[R][8]) {
    __m256 f[R];
    for (int r = 0; r < R; r++) f[r] = _mm256_setzero_ps();
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15);
    int64_t per_group = w.group / GROUP;
    __m256 wide = _mm256_setzero_ps(), least = wide;
    for (int64_t g = 0; g < in.groups; g++) {
        if (g % per_group == 0) {
            wide = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block + half * 16)));
            least = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 32 + half * 16)));
            if (w.in_steps) least = _mm256_mul_ps(least, wide);
            block += 64;
        }
        __m256i sum[R];
        for (int r = 0; r < R; r++) sum[r] = _mm256_setzero_si256();
        for (int j = 0; j < 4; j++, block += 64) {
            __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + half * 32));
            if (!half) fetch(block);
            __m256i w0 = _mm256_and_si256(both, low), w1 = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
            for (int r = 0; r < R; r++) {
                const int8_t* a = in.numbers + (row + r) * in.inputs + g * GROUP + j * 4;
                sum[r] = _mm256_add_epi16(sum[r], _mm256_maddubs_epi16(w0, _mm256_set1_epi32(four(a))));
                sum[r] = _mm256_add_epi16(sum[r], _mm256_maddubs_epi16(w1, _mm256_set1_epi32(four(a + 16))));
            }
        }
        for (int r = 0; r < R; r++) {
            float scale = in.scale[(row + r) * in.groups + g];
            __m256 whole = _mm256_cvtepi32_ps(_mm256_madd_epi16(sum[r], ones));
            f[r] = _mm256_fmadd_ps(_mm256_mul_ps(wide, _mm256_set1_ps(scale)), whole, f[r]);
            f[r] = _mm256_fmadd_ps(least, _mm256_set1_ps(in.weighted[(row + r) * in.groups + g]), f[r]);
        }
    }
    for (int r = 0; r < R; r++) _mm256_storeu_ps(sums[r], f[r]);
}

template <int R>
AVX2 void rows_avx2(const Output& out, const Quantised& in, const uint8_t* block, int64_t row, int64_t column) {
    float sums[R][8];
    for (int64_t half = 0; half < 2 && column + half * 8 < out.w.outputs; half++) {
        if (out.w.bits == 8)
            tile8_avx2<R>(block, half, in, out.w.group, row, sums);
        else
            tile4_avx2<R>(block, half, in, out.w, row, sums);
        for (int r = 0; r < R; r++) finish(out, row + r, column + half * 8, 8, sums[r]);
    }
}

// -- AVX-512 with VNNI: R rows by 16 outputs ----------------------------------------------------------------------------

// Weights as w + 128 (0..255): the sum begins with -128 times the sum of the activations.
template <int R>
VNNI void tile8_vnni(const uint8_t* block, const Quantised& in, int64_t group, int64_t row, float sums[R][16]) {
    __m512 f[R];
    for (int r = 0; r < R; r++) f[r] = _mm512_setzero_ps();
    const __m512i turn = _mm512_set1_epi8(-128);
    int64_t per_group = group / GROUP;
    __m512 wide = _mm512_setzero_ps();
    for (int64_t g = 0; g < in.groups; g++) {
        if (g % per_group == 0) {
            wide = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block)));
            block += 32;
        }
        __m512i sum[R];
        for (int r = 0; r < R; r++) sum[r] = _mm512_set1_epi32(in.offset[(row + r) * in.groups + g]);
        for (int j = 0; j < 8; j++, block += 64) {
            __m512i w = _mm512_xor_si512(_mm512_loadu_si512(block), turn);
            fetch(block);
            for (int r = 0; r < R; r++) {
                __m512i a = _mm512_set1_epi32(four(in.numbers + (row + r) * in.inputs + g * GROUP + j * 4));
                sum[r] = _mm512_dpbusd_epi32(sum[r], w, a);
            }
        }
        for (int r = 0; r < R; r++) {
            __m512 scale = _mm512_mul_ps(wide, _mm512_set1_ps(in.scale[(row + r) * in.groups + g]));
            f[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r]), scale, f[r]);
        }
    }
    for (int r = 0; r < R; r++) _mm512_storeu_ps(sums[r], f[r]);
}

template <int R>
VNNI void tile4_vnni(const uint8_t* block, const Quantised& in, const Weights& w, int64_t row, float sums[R][16]) {
    __m512 f[R];
    for (int r = 0; r < R; r++) f[r] = _mm512_setzero_ps();
    const __m512i low = _mm512_set1_epi8(15);
    int64_t per_group = w.group / GROUP;
    __m512 wide = _mm512_setzero_ps(), least = wide;
    for (int64_t g = 0; g < in.groups; g++) {
        if (g % per_group == 0) {
            wide = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block)));
            least = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 32)));
            if (w.in_steps) least = _mm512_mul_ps(least, wide);
            block += 64;
        }
        __m512i sum[R];
        for (int r = 0; r < R; r++) sum[r] = _mm512_setzero_si512();
        for (int j = 0; j < 4; j++, block += 64) {
            __m512i both = _mm512_loadu_si512(block);
            fetch(block);
            __m512i w0 = _mm512_and_si512(both, low), w1 = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
            for (int r = 0; r < R; r++) {
                const int8_t* a = in.numbers + (row + r) * in.inputs + g * GROUP + j * 4;
                sum[r] = _mm512_dpbusd_epi32(sum[r], w0, _mm512_set1_epi32(four(a)));
                sum[r] = _mm512_dpbusd_epi32(sum[r], w1, _mm512_set1_epi32(four(a + 16)));
            }
        }
        for (int r = 0; r < R; r++) {
            float scale = in.scale[(row + r) * in.groups + g];
            f[r] = _mm512_fmadd_ps(_mm512_mul_ps(wide, _mm512_set1_ps(scale)), _mm512_cvtepi32_ps(sum[r]), f[r]);
            f[r] = _mm512_fmadd_ps(least, _mm512_set1_ps(in.weighted[(row + r) * in.groups + g]), f[r]);
        }
    }
    for (int r = 0; r < R; r++) _mm512_storeu_ps(sums[r], f[r]);
}

template <int R>
VNNI void rows_vnni(const Output& out, const Quantised& in, const uint8_t* block, int64_t row, int64_t column) {
    float sums[R][16];
    if (out.w.bits == 8)
        tile8_vnni<R>(block, in, out.w.group, row, sums);
    else
        tile4_vnni<R>(block, in, out.w, row, sums);
    for (int r = 0; r < R; r++) finish(out, row + r, column, 16, sums[r]);
}

// -- all rows ------------------------------------------------------------------------------------------------------------

using RowsKernel = void (*)(const Output&, const Quantised&, const uint8_t*, int64_t, int64_t);
constexpr RowsKernel BY_AVX2[] = {rows_avx2<1>, rows_avx2<2>, rows_avx2<3>, rows_avx2<4>};
constexpr RowsKernel BY_VNNI[] = {rows_vnni<1>, rows_vnni<2>, rows_vnni<3>, rows_vnni<4>,
                                  rows_vnni<5>, rows_vnni<6>, rows_vnni<7>, rows_vnni<8>};

void multiply(int level, const Quantised& in, int64_t rows, const Output& out, int64_t begin, int64_t end) {
    const RowsKernel* kernels = level == WITH_VNNI ? BY_VNNI : BY_AVX2;
    int64_t most = level == WITH_VNNI ? 8 : 4;
    const Weights& w = out.w;
    int64_t group_bytes = w.bits == 8 ? 32 + w.group * BLOCK : 64 + w.group * BLOCK / 2;
    int64_t block_bytes = w.padded_inputs / w.group * group_bytes;
    for (int64_t block = begin; block < end; block++)
        for (int64_t row = 0; row < rows;) {
            int64_t now = std::min(most, rows - row);
            kernels[now - 1](out, in, w.packed + block * block_bytes, row, block * BLOCK);
            row += now;
        }
}

// -- float32 weights -----------------------------------------------------------------------------------------------------

// One row of what goes in.
AVX2 void widen(const Input& in, int64_t inputs, int64_t row, float* out) {
    const float* x = in.x + row * in.stride;
    float factor = in.norm ? norm_factor(x, inputs, in.eps) : 1.f;
    const float* other = in.norm ? in.norm : x + inputs;
    int64_t k = 0;
    for (; k + 8 <= inputs; k += 8) {
        __m256 v = _mm256_loadu_ps(x + k), o = _mm256_loadu_ps(other + k);
        if (in.norm) {
            v = _mm256_mul_ps(_mm256_mul_ps(v, _mm256_set1_ps(factor)), o);
        } else {
            __m256 below = _mm256_add_ps(_mm256_set1_ps(1.f), exponential(_mm256_sub_ps(_mm256_setzero_ps(), v)));
            v = _mm256_mul_ps(_mm256_div_ps(v, below), o);
        }
        _mm256_storeu_ps(out + k, v);
    }
    for (; k < inputs; k++) out[k] = in.norm ? x[k] * factor * other[k] : x[k] / (1.f + std::exp(-x[k])) * other[k];
}

// `blocks` blocks of float32 weights from `block` on, which is at most as many as one kernel takes.
void multiply_floats(bool wide, const float* weights, const float* x, int64_t stride, int64_t rows, const Output& out, int64_t block,
                     int64_t blocks) {
    int64_t inputs = out.w.inputs;
    int64_t most = cut(wide, rows).rows;
    float sums[12 * 2 * BLOCK];
    for (int64_t row = 0; row < rows; row += most) {
        int64_t now = std::min(most, rows - row);
        full_kernel(wide, now, blocks)(weights, inputs, x + row * stride, stride, sums);
        for (int64_t r = 0; r < now; r++) finish(out, row + r, block * BLOCK, blocks * BLOCK, sums + r * blocks * BLOCK);
    }
}

void multiply_full(bool wide, const float* x, int64_t stride, int64_t rows, const Output& out, int64_t begin, int64_t end) {
    const float* weights = reinterpret_cast<const float*>(out.w.packed);
    for (int64_t block = begin; block < end;) {
        int64_t blocks = cut(wide, rows).blocks;
        while (blocks > end - block) blocks /= 2;
        multiply_floats(wide, weights + block * BLOCK * out.w.inputs, x, stride, rows, out, block, blocks);
        block += blocks;
    }
}

}  // namespace

#include "exact.h"

namespace {

// What goes in, ready, and each thread's room.
size_t product_bytes(int64_t rows, const Weights& w, int threads) {
    if (!w.exact) return quantised_bytes(rows, w.padded_inputs);
    return (rows * w.inputs + widening_room(w) * std::max(threads, 1) + BLOCK) * sizeof(float);
}

// Called by every thread of a team; x must be whole before, y is after.
void product(Team& team, int level, const Weights& w, const Input& in, const float* residual, float* y, char* memory) {
    Output out{w, residual, y};
    int64_t blocks = (w.outputs + BLOCK - 1) / BLOCK;
    if (w.exact) {
        const float* x = in.x;
        int64_t stride = in.stride;
        if (in.norm || in.gated) {
            float* ready = reinterpret_cast<float*>(memory);
            team.divide(in.rows, [&](int64_t begin, int64_t end) {
                for (int64_t row = begin; row < end; row++) widen(in, w.inputs, row, ready + row * w.inputs);
            });
            x = ready, stride = w.inputs;
        }
        bool wide = level == WITH_VNNI;
        int64_t step = in.rows <= 6 && blocks >= 32 * team.parts ? 4 : 2;
        team.divide((blocks + step - 1) / step, [&](int64_t begin, int64_t end) {
            int64_t from = begin * step, to = std::min(end * step, blocks);
            if (w.bits == 32) return multiply_full(wide, x, stride, in.rows, out, from, to);
            float* room = reinterpret_cast<float*>(memory) + in.rows * w.inputs + team.part * widening_room(w);
            auto multiply = w.bits == 16 ? multiply_exact<16> : w.bits == 8 ? multiply_exact<8> : multiply_exact<4>;
            multiply(wide, x, stride, in.rows, out, from, to, room);
        });
        return;
    }
    Quantised quantised = place(memory, in.rows, w.padded_inputs);
    team.divide(in.rows, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) quantise(in, w.inputs, quantised, row);
    });
    team.divide(blocks, [&](int64_t begin, int64_t end) { multiply(level, quantised, in.rows, out, begin, end); });
}

}  // namespace

#include "attention.h"

extern "C" {

// 0: this CPU can't run the kernels, 1: AVX2, 2: AVX-512 with VNNI.
int pairscope_level() {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return NONE;
    bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                __builtin_cpu_supports("avx512vnni");
    return wide ? WITH_VNNI : WITH_AVX2;
}

// y [rows, outputs] = what goes in, times the weights, plus the bias and `residual` (null, or [rows, outputs], or y itself).
void pairscope_product(int level, const Weights* w, const float* x, int64_t rows, int64_t stride, const float* norm, double eps,
                       int64_t gated, const float* residual, float* y, int threads) {
    static thread_local Memory memory;
    char* bytes = memory.at_least(product_bytes(rows, *w, threads));
    Input in{x, rows, stride, norm, eps, gated};
    together(threads, [&](Team& team) { product(team, level, *w, in, residual, y, bytes); });
}

// out [rows, heads x head_dim] of the queries that begin each row of `q`, rows `stride` numbers apart; head_dim is a multiple of 8.
void pairscope_attention(int level, const float* q, int64_t stride, const float* cache, const int64_t* table, const int64_t* firsts,
                         const int64_t* lengths, int64_t rows, int64_t blocks, int64_t block_size, int64_t heads,
                         int64_t kv_heads, int64_t head_dim, double scale, float* out, int threads) {
    static thread_local Memory memory;
    Attention a{cache, table, firsts, lengths, blocks, block_size, heads, kv_heads, head_dim, scale};
    int64_t room = attention_room(blocks * block_size);
    auto* weights = reinterpret_cast<float*>(memory.at_least(sizeof(float) * room * std::max(threads, 1)));
    together(threads, [&](Team& team) {
        attend_rows(team, level, rows, a, q, stride, out, weights + team.part * room, [&](int64_t row) { return Place{&a, row}; });
    });
}

#include "step.h"
}
