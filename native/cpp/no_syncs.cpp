// Syncs that return at once, for a measurement of what syncs cost: bench/bench_day.py runs days with it and without.
//
// LD_PRELOAD loads it into a program and all that the program starts: Python, the JVM, ranks, SQLite, PostgreSQL.

#include <unistd.h>

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int fsync(int) { return 0; }
EXPORTED int fdatasync(int) { return 0; }
EXPORTED int syncfs(int) noexcept { return 0; }
EXPORTED void sync() noexcept {}
EXPORTED int sync_file_range(int, off_t, off_t, unsigned) { return 0; }
