// How the threads of one call share work: units are taken as threads come to them, so that one that a neighbour holds up does less.

#pragma once

#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

constexpr int SPINS = 1000;  // some tens of microseconds; who waits longer gives its processor away

// What a team has in common. Counters take turns: one is used, the one after the next is set back.
struct Shared {
    alignas(64) std::atomic<int> waiting{0};
    alignas(64) std::atomic<int> round{0};
    struct alignas(64) Counter {
        std::atomic<int64_t> next{0};
    } counters[4];
};

// One thread's place in a team. All call the same members in the same order.
struct Team {
    Shared& shared;
    int part, parts;
    int phase = 0;

    // Everything written before is seen by all after it.
    void barrier() {
        if (parts == 1) return;
        int round = shared.round.load(std::memory_order_relaxed);
        if (shared.waiting.fetch_add(1, std::memory_order_acq_rel) == parts - 1) {
            shared.waiting.store(0, std::memory_order_relaxed);
            shared.round.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; shared.round.load(std::memory_order_acquire) == round; spins++)
            if (spins < SPINS)
                _mm_pause();
            else
                sched_yield();
    }

    // work(begin, end) for all of 0..units, and a barrier. What it computes must not depend on who computes it.
    template <class Work>
    void divide(int64_t units, Work work) {
        if (parts == 1) {
            if (units > 0) work(int64_t(0), units);
            return;
        }
        auto& next = shared.counters[phase % 4].next;
        if (part == 0) shared.counters[(phase + 2) % 4].next.store(0, std::memory_order_relaxed);
        phase++;
        int64_t piece = std::max<int64_t>(1, units / (parts * 6));
        for (int64_t begin; (begin = next.fetch_add(piece, std::memory_order_relaxed)) < units;)
            work(begin, std::min(begin + piece, units));
        barrier();
    }
};

// work(team) by so many threads.
template <class Work>
void together(int threads, Work work) {
#ifdef _OPENMP
    Shared shared;
#pragma omp parallel num_threads(threads)
    {
        Team team{shared, omp_get_thread_num(), omp_get_num_threads()};
        work(team);
    }
#else
    (void)threads;
    Shared shared;
    Team team{shared, 0, 1};
    work(team);
#endif
}

}  // namespace
