// Numbers in memory that processes share, announced and waited for: headrace.comm.shared_memory.

#include <cstdint>
#include <ctime>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// Rounds before a waiting process sleeps: some 20 microseconds, about what falling asleep and waking up would take.
constexpr int kRounds = 400;

inline void rest() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Counts wrap around: a is at b or behind it.
inline bool reached(uint32_t a, uint32_t b) { return int32_t(a - b) >= 0; }

}  // namespace

extern "C" {

// All that this process wrote before is seen by whoever sees the new value.
void headrace_set_and_wake(uint32_t* word, uint32_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
#if defined(__linux__)
  syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

// Wait until the word is at `target` or above; 0 after so many microseconds.
int headrace_wait_until(const uint32_t* word, uint32_t target, int64_t microseconds) {
  for (int i = 0; i < kRounds; ++i) {
    if (reached(__atomic_load_n(word, __ATOMIC_ACQUIRE), target)) return 1;
    rest();
  }
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t end = now.tv_sec * 1000000000LL + now.tv_nsec + microseconds * 1000;
  for (;;) {
    const uint32_t seen = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    if (reached(seen, target)) return 1;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const int64_t left = end - (now.tv_sec * 1000000000LL + now.tv_nsec);
    if (left <= 0) return 0;
    const timespec limit{left / 1000000000, left % 1000000000};
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
    const timespec nap{0, left < 100000 ? left : 100000};
    nanosleep(&nap, nullptr);
#endif
  }
}

}  // extern "C"
