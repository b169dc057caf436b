// How the threads of one call share work: units are taken as threads come to them, so that one that a neighbour holds up does less.

#pragma once

#include <immintrin.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

constexpr int SPINS = 1000;  // some tens of microseconds; who waits longer sleeps until it is woken

// What a team has in common. Counters take turns: one is used, the one after the next is set back.
struct Shared {
    alignas(64) std::atomic<int> waiting{0};
    alignas(64) std::atomic<int> round{0};
    std::atomic<int> sleeping{0};  // for `round` to change
    struct alignas(64) Counter {
        std::atomic<int64_t> next{0};
    } counters[4];
};

// Where a neighbour wants the processor, yielding is not enough: between sessions that the kernel groups (sched_autogroup), or
// containers, sched_yield returns at once, and the thread that is waited for does not come to run. So who waits sleeps.
inline void sleep_while(std::atomic<int>& word, int value) {
#ifdef __linux__
    static_assert(sizeof(word) == sizeof(int), "a futex is an int");
    syscall(SYS_futex, reinterpret_cast<int*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
    (void)word, (void)value;
    sched_yield();
#endif
}

inline void wake_all(std::atomic<int>& word) {
#ifdef __linux__
    syscall(SYS_futex, reinterpret_cast<int*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

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
            // In one order with `sleeping`: either we see who sleeps, or it sees that the round has changed.
            shared.round.store(round + 1, std::memory_order_seq_cst);
            if (shared.sleeping.load(std::memory_order_seq_cst)) wake_all(shared.round);
            return;
        }
        for (int spins = 0; shared.round.load(std::memory_order_acquire) == round; spins++) {
            if (spins < SPINS) {
                _mm_pause();
                continue;
            }
            shared.sleeping.fetch_add(1, std::memory_order_seq_cst);
            sleep_while(shared.round, round);
            shared.sleeping.fetch_sub(1, std::memory_order_relaxed);
        }
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
