// All layers over the tokens of one step, in one call: each token is a row that attends to its own span of the cache.
//
// Included within extern "C" at the end of quantized.cpp.

#pragma once

struct StepLayer {
    const Weights* qkv;
    const Weights* attention_out;
    const Weights* gate_up;
    const Weights* down;
    const float* attention_norm;
    const float* mlp_norm;
    float* cache;  // slots: K of all KV heads, then V of all KV heads
};

struct StepModel {
    const StepLayer* layers;
    int64_t num_layers, hidden, intermediate, heads, kv_heads, head_dim, block_size;
    const float* rotations;  // [context, head_dim]: cos and sin of each pair's angle
    double eps, scale;
};

// Rows `begin` to before `end`, whose tables are `table_stride` numbers apart: 0 where they share one. See Attention.
struct StepGroup {
    int64_t begin, end;
    const int64_t* table;
    int64_t table_stride, blocks;
    const int64_t* firsts;   // of row `begin` on
    const int64_t* lengths;  // of row `begin` on
};

struct StepBatch {
    float* x;  // [rows, hidden]: embeddings in, hidden states out
    int64_t rows;
    const int64_t* positions;
    const int64_t* slots;
    const StepGroup* groups;
    int64_t num_groups;
    double attention_s;  // what norm, Q, K, V, attention and the product after it took, as the first thread saw it
};

namespace {

// Turns the heads of Q and K by the row's position and puts K and V where they are kept.
AVX2 void rotate_and_keep(const StepModel& m, const StepBatch& batch, float* cache, int64_t row, float* qkv) {
    const float* turn = m.rotations + batch.positions[row] * m.head_dim;
    for (int64_t head = 0; head < m.heads + m.kv_heads; head++) {
        float* v = qkv + head * m.head_dim;
        for (int64_t i = 0; i < m.head_dim; i += 8) {
            __m256 pair = _mm256_loadu_ps(v + i), angle = _mm256_loadu_ps(turn + i);
            __m256 swapped = _mm256_permute_ps(pair, 0xb1);
            __m256 cosine = _mm256_moveldup_ps(angle), sine = _mm256_movehdup_ps(angle);
            _mm256_storeu_ps(v + i, _mm256_fmaddsub_ps(pair, cosine, _mm256_mul_ps(swapped, sine)));
        }
    }
    int64_t width = 2 * m.kv_heads * m.head_dim;
    std::memcpy(cache + batch.slots[row] * width, qkv + m.heads * m.head_dim, width * sizeof(float));
}

void attend_all(Team& team, int level, const StepModel& m, const StepBatch& batch, const float* cache, const float* qkv,
                float* out, float* weights) {
    int64_t stride = (m.heads + 2 * m.kv_heads) * m.head_dim;
    Attention a{cache, nullptr, nullptr, nullptr, 0, m.block_size, m.heads, m.kv_heads, m.head_dim, m.scale};
    const StepGroup* group = nullptr;
    attend_rows(team, level, batch.rows, a, qkv, stride, out, weights, [&](int64_t row) {
        if (!group || row < group->begin || row >= group->end) {
            group = batch.groups;
            while (row >= group->end) group++;
            a.table = group->table, a.firsts = group->firsts, a.lengths = group->lengths, a.table_stride = group->table_stride;
        }
        return Place{&a, row - group->begin};
    });
}

}  // namespace

// Groups lie in the order of their rows and cover all; head_dim is a multiple of 8.
void pairscope_step(int level, const StepModel* model, StepBatch* given, int threads) {
    static thread_local Memory memory;
    const StepModel& m = *model;
    StepBatch& batch = *given;
    using Clock = std::chrono::steady_clock;
    Clock::duration in_attention{};
    int64_t rows = batch.rows, q_width = m.heads * m.head_dim, stride = q_width + 2 * m.kv_heads * m.head_dim;
    int64_t room = 0;
    for (int64_t g = 0; g < batch.num_groups; g++)
        room = std::max(room, attention_room(batch.groups[g].blocks * m.block_size));
    size_t scratch = 0;
    for (const StepLayer* layer = m.layers; layer < m.layers + m.num_layers; layer++)  // layers may hold different kinds of weights
        for (const Weights* w : {layer->qkv, layer->attention_out, layer->gate_up, layer->down})
            scratch = std::max(scratch, product_bytes(rows, *w, threads));
    scratch = (scratch + 63) / 64 * 64;
    int64_t floats = rows * std::max(stride + q_width, 2 * m.intermediate) + room * std::max(threads, 1) + 16;
    char* bytes = memory.at_least(scratch + floats * sizeof(float));
    float* weights = reinterpret_cast<float*>(bytes + scratch);
    float* qkv = weights + room * std::max(threads, 1);
    float* attended = qkv + rows * stride;
    float* gate_up = qkv;  // when attention is done
    together(threads, [&](Team& team) {
        for (int64_t number = 0; number < m.num_layers; number++) {
            const StepLayer& layer = m.layers[number];
            Clock::time_point began = team.part ? Clock::time_point() : Clock::now();
            product(team, level, *layer.qkv, {batch.x, rows, m.hidden, layer.attention_norm, m.eps, 0}, nullptr, qkv, bytes);
            team.divide(rows, [&](int64_t begin, int64_t end) {
                for (int64_t row = begin; row < end; row++) rotate_and_keep(m, batch, layer.cache, row, qkv + row * stride);
            });
            attend_all(team, level, m, batch, layer.cache, qkv, attended, weights + team.part * room);
            product(team, level, *layer.attention_out, {attended, rows, q_width, nullptr, 0, 0}, batch.x, batch.x, bytes);
            if (!team.part) in_attention += Clock::now() - began;
            product(team, level, *layer.gate_up, {batch.x, rows, m.hidden, layer.mlp_norm, m.eps, 0}, nullptr, gate_up, bytes);
            product(team, level, *layer.down, {gate_up, rows, 2 * m.intermediate, nullptr, 0, 1}, batch.x, batch.x, bytes);
        }
    });
    batch.attention_s = std::chrono::duration<double>(in_attention).count();
}
