// Attention of single tokens over the paged cache, which is read through the block table where it lies.
//
// Included in quantized.cpp, after what it builds on.

#pragma once

namespace {

// What attention reads. A slot of the cache holds K of all KV heads, then V of all KV heads, `width` numbers in all.
struct Attention {
    const float* cache;
    const int64_t* table;    // [rows, blocks]: which blocks hold a row's context, in order; rows `table_stride` numbers apart
    const int64_t* firsts;   // [rows]: the first token in the table's blocks that a row attends to
    const int64_t* lengths;  // [rows]: the token before which it ends
    int64_t table_stride, block_size, heads, kv_heads, head_dim;
    double scale;

    int64_t width() const { return 2 * kv_heads * head_dim; }
};

constexpr int TOGETHER = 4;  // heads that share keys and values and are computed together

// Numbers that one thread needs for the weights of a context of so many tokens; a cache line is nobody else's.
int64_t attention_room(int64_t tokens) { return (TOGETHER * tokens + 31) / 16 * 16; }

// Sum of weights[t] * V of token t, for N * 8 numbers of a head.
template <int N>
AVX2 void weighted(const Attention& a, int64_t row, int64_t offset, const float* weights, float* out) {
    __m256 sums[N];
    for (int i = 0; i < N; i++) sums[i] = _mm256_setzero_ps();
    int64_t first = a.firsts[row], length = a.lengths[row], width = a.width();
    for (int64_t begin = first / a.block_size * a.block_size; begin < length; begin += a.block_size) {
        int64_t block = a.table[row * a.table_stride + begin / a.block_size];
        int64_t from = std::max(begin, first), end = std::min(begin + a.block_size, length);
        const float* v = a.cache + (block * a.block_size + from - begin) * width + offset;
        for (int64_t t = from; t < end; t++, v += width) {
            __m256 weight = _mm256_set1_ps(weights[t]);
            for (int i = 0; i < N; i++) sums[i] = _mm256_fmadd_ps(weight, _mm256_loadu_ps(v + 8 * i), sums[i]);
        }
    }
    for (int i = 0; i < N; i++) _mm256_storeu_ps(out + 8 * i, sums[i]);
}

// One query of one head: softmax(scale q K) V. `weights` has room for the context, rounded up to 8.
AVX2 void attend(const Attention& a, const float* q, int64_t row, int64_t kv_head, float* weights, float* out) {
    int64_t first = a.firsts[row], length = a.lengths[row], width = 2 * a.kv_heads * a.head_dim;
    float scale = float(a.scale), most = -INFINITY;
    for (int64_t begin = first / a.block_size * a.block_size; begin < length; begin += a.block_size) {
        int64_t block = a.table[row * a.table_stride + begin / a.block_size];
        int64_t from = std::max(begin, first), end = std::min(begin + a.block_size, length);
        const float* k = a.cache + (block * a.block_size + from - begin) * width + kv_head * a.head_dim;
        for (int64_t t = from; t < end; t++, k += width) {
            __m256 even = _mm256_setzero_ps(), odd = even;
            int64_t i = 0;
            for (; i + 16 <= a.head_dim; i += 16) {
                even = _mm256_fmadd_ps(_mm256_loadu_ps(q + i), _mm256_loadu_ps(k + i), even);
                odd = _mm256_fmadd_ps(_mm256_loadu_ps(q + i + 8), _mm256_loadu_ps(k + i + 8), odd);
            }
            if (i < a.head_dim) even = _mm256_fmadd_ps(_mm256_loadu_ps(q + i), _mm256_loadu_ps(k + i), even);
            weights[t] = total(_mm256_add_ps(even, odd)) * scale;
            most = std::max(most, weights[t]);
        }
    }
    int64_t vectors = first / 8 * 8;
    for (int64_t t = vectors; t < first; t++) weights[t] = -INFINITY;
    for (int64_t t = length; t % 8; t++) weights[t] = -INFINITY;
    __m256 sums = _mm256_setzero_ps();
    for (int64_t t = vectors; t < length; t += 8) {
        __m256 score = _mm256_loadu_ps(weights + t);
        __m256 there = _mm256_cmp_ps(score, _mm256_set1_ps(-INFINITY), _CMP_NEQ_UQ);
        __m256 e = _mm256_and_ps(exponential(_mm256_sub_ps(score, _mm256_set1_ps(most))), there);
        _mm256_storeu_ps(weights + t, e);
        sums = _mm256_add_ps(sums, e);
    }
    __m256 share = _mm256_set1_ps(1.f / total(sums));
    for (int64_t t = vectors; t < length; t += 8) _mm256_storeu_ps(weights + t, _mm256_mul_ps(_mm256_loadu_ps(weights + t), share));
    int64_t values = (a.kv_heads + kv_head) * a.head_dim, at = 0;
    for (; at + 64 <= a.head_dim; at += 64) weighted<8>(a, row, values + at, weights, out + at);
    for (; at + 16 <= a.head_dim; at += 16) weighted<2>(a, row, values + at, weights, out + at);
    if (at < a.head_dim) weighted<1>(a, row, values + at, weights, out + at);
}

// The sums over each of four vectors, always in the same order.
VNNI inline __m128 four_totals(__m512 a, __m512 b, __m512 c, __m512 d) {
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// G queries (4 at most) of heads of N * 16 numbers that share one KV head. Four weights lie together for each token; a head's
// result does not depend on G.
template <int N, int G>
VNNI void attend_wide(const Attention& a, const float* q, int64_t row, int64_t kv_head, float* weights, float* out) {
    int64_t first = a.firsts[row], length = a.lengths[row], width = a.width();
    __m512 query[TOGETHER][N], part[TOGETHER];
    for (int g = 0; g < TOGETHER; g++) {
        part[g] = _mm512_setzero_ps();
        for (int n = 0; n < N; n++) query[g][n] = g < G ? _mm512_loadu_ps(q + (g * N + n) * 16) : part[g];
    }
    __m128 most = _mm_set1_ps(-INFINITY), scale = _mm_set1_ps(float(a.scale));
    for (int64_t begin = first / a.block_size * a.block_size; begin < length; begin += a.block_size) {
        int64_t block = a.table[row * a.table_stride + begin / a.block_size];
        int64_t from = std::max(begin, first), end = std::min(begin + a.block_size, length);
        const float* k = a.cache + (block * a.block_size + from - begin) * width + kv_head * a.head_dim;
        for (int64_t t = from; t < end; t++, k += width) {
            for (int n = 0; n < N; n++) _mm_prefetch(reinterpret_cast<const char*>(k + 4 * width + n * 16), _MM_HINT_T0);
            for (int n = 0; n < N; n++) {
                __m512 key = _mm512_loadu_ps(k + n * 16);
                for (int g = 0; g < G; g++) part[g] = n ? _mm512_fmadd_ps(query[g][n], key, part[g]) : _mm512_mul_ps(query[g][0], key);
            }
            __m128 score = _mm_mul_ps(four_totals(part[0], part[1], part[2], part[3]), scale);
            _mm_storeu_ps(weights + t * TOGETHER, score);
            most = _mm_max_ps(most, score);
        }
    }
    __m256 highest = _mm256_set_m128(most, most), sums = _mm256_setzero_ps();
    for (int64_t t = first; t < length; t += 2) {
        __m256 score = _mm256_loadu_ps(weights + t * TOGETHER);
        __m256 e = exponential(_mm256_sub_ps(score, highest));
        if (t + 1 == length) e = _mm256_insertf128_ps(e, _mm_setzero_ps(), 1);  // no token: what stood there means nothing
        _mm256_storeu_ps(weights + t * TOGETHER, e);
        sums = _mm256_add_ps(sums, e);
    }
    float shares[TOGETHER];
    _mm_storeu_ps(shares, _mm_div_ps(_mm_set1_ps(1.f), _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1))));
    __m512 found[G][N];
    for (int g = 0; g < G; g++)
        for (int n = 0; n < N; n++) found[g][n] = _mm512_setzero_ps();
    for (int64_t begin = first / a.block_size * a.block_size; begin < length; begin += a.block_size) {
        int64_t block = a.table[row * a.table_stride + begin / a.block_size];
        int64_t from = std::max(begin, first), end = std::min(begin + a.block_size, length);
        const float* v = a.cache + (block * a.block_size + from - begin) * width + (a.kv_heads + kv_head) * a.head_dim;
        for (int64_t t = from; t < end; t++, v += width) {
            for (int n = 0; n < N; n++) _mm_prefetch(reinterpret_cast<const char*>(v + 4 * width + n * 16), _MM_HINT_T0);
            for (int n = 0; n < N; n++) {
                __m512 value = _mm512_loadu_ps(v + n * 16);
                for (int g = 0; g < G; g++) found[g][n] = _mm512_fmadd_ps(_mm512_set1_ps(weights[t * TOGETHER + g]), value, found[g][n]);
            }
        }
    }
    for (int g = 0; g < G; g++)
        for (int n = 0; n < N; n++) _mm512_storeu_ps(out + (g * N + n) * 16, _mm512_mul_ps(found[g][n], _mm512_set1_ps(shares[g])));
}

using AttendKernel = void (*)(const Attention&, const float*, int64_t, int64_t, float*, float*);
template <int N>
constexpr AttendKernel WIDE[] = {attend_wide<N, 1>, attend_wide<N, 2>, attend_wide<N, 3>, attend_wide<N, 4>};

// The kernels for 1 to 4 heads at once; null where there are none for such heads.
const AttendKernel* wide_kernels(int level, int64_t head_dim) {
    if (level != WITH_VNNI) return nullptr;
    return head_dim == 32 ? WIDE<2> : head_dim == 64 ? WIDE<4> : head_dim == 96 ? WIDE<6> : head_dim == 128 ? WIDE<8> : nullptr;
}

// Where a row's context is told: row `row` of `attention`.
struct Place {
    const Attention* attention;
    int64_t row;
};

// Attention of all heads of all rows; `place(row)` says where a row's context is. Rows of q lie `stride` numbers apart.
template <class Find>
void attend_rows(Team& team, int level, int64_t rows, const Attention& shape, const float* q, int64_t stride, float* out,
                 float* weights, Find place) {
    const AttendKernel* kernels = wide_kernels(level, shape.head_dim);
    int64_t per_kv_head = shape.heads / shape.kv_heads;
    bool many = rows * shape.kv_heads >= 4 * team.parts;  // else heads are shared out one by one
    int64_t most = kernels && many ? std::min<int64_t>(shape.head_dim > 64 ? 3 : TOGETHER, per_kv_head) : 1;
    int64_t parts = (per_kv_head + most - 1) / most, units = shape.kv_heads * parts;
    team.divide(rows * units, [&](int64_t begin, int64_t end) {
        for (int64_t unit = begin; unit < end; unit++) {
            int64_t row = unit / units, kv_head = unit % units / parts, part = unit % parts;
            int64_t head = kv_head * per_kv_head + part * most, now = std::min(most, per_kv_head - part * most);
            Place at = place(row);
            const float* query = q + row * stride + head * shape.head_dim;
            float* to = out + (row * shape.heads + head) * shape.head_dim;
            if (kernels)
                kernels[now - 1](*at.attention, query, at.row, kv_head, weights, to);
            else
                attend(*at.attention, query, at.row, kv_head, weights, to);
        }
    });
}

}  // namespace
