// A recorder of every change to one folder, for tests of power cuts: tests/fault/recorded_disk.py reads its log.
//
// LD_PRELOAD loads it into a program and all that the program starts. It stands before the C library's functions that
// change files and appends a record of each change below the folder to a log, in one order for all processes. Writes
// are recorded with their bytes. fsync and its like are recorded and not done: the recorder stands in for the disk.
//
//   DISK_RECORDER_FOLDER    the folder, an absolute path without links
//   DISK_RECORDER_LOG       the log, outside of the folder; LOG.turn beside it holds the lock
//   DISK_RECORDER_WITHOUT   names in the folder whose contents are not recorded, with colons between
//
// Not seen: programs without a dynamic linker, changes by system calls that bypass the C library (renames by Rust's
// tempfile crate: the reader infers them at the next fsync or rename of the file), writes by stdio before fflush or
// fclose, and writes to a shared mapping before msync, munmap, fsync or the program's end. The reader's comparison of
// all records with the folder (RecordedDisk.differences) finds what was missed.

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

namespace {

// The numbers are the log's: RecordKind in tests/fault/recorded_disk.py.
enum Kind : uint32_t {
  kCreate = 1,
  kWrite = 2,
  kTruncate = 3,
  kAllocate = 4,
  kRename = 5,
  kLink = 6,
  kSymlink = 7,
  kUnlink = 8,
  kMakeFolder = 9,
  kRemoveFolder = 10,
  kSync = 11,
  kSyncAll = 12,
  kContent = 13,
};

struct Record {
  uint32_t kind;
  uint32_t pid;
  uint64_t inode;
  uint64_t offset;
  uint64_t length;  // of kWrite and kContent: bytes behind the paths; of kTruncate and kAllocate: of the file
  uint32_t flags;   // of renameat2 and fallocate
  uint32_t path_bytes;
  uint32_t other_bytes;
  uint32_t unused;
};
static_assert(sizeof(Record) == 48, "the reader unpacks 48 bytes");

struct Mapping {
  char* begin;
  size_t length;
  uint64_t inode;
  uint64_t offset;
};

char folder[PATH_MAX];
size_t folder_length = 0;
char log_name[PATH_MAX];
char excluded[PATH_MAX];
int log_file = -1;
ino_t log_inode = 0;
pthread_mutex_t* log_lock = nullptr;
bool is_on = false;
thread_local bool is_inside = false;
std::mutex mappings_lock;
std::vector<Mapping>* mappings = nullptr;

template <typename F>
F next(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

// Keep errno as the recorded call left it.
struct KeepErrno {
  int number = errno;
  ~KeepErrno() { errno = number; }
};

// One process's turn at the folder and the log: a change and its record are one step for all others.
class LogTurn {
 public:
  LogTurn() {
    is_inside = true;
    const int result = pthread_mutex_lock(log_lock);
    if (result == EOWNERDEAD) pthread_mutex_consistent(log_lock);
  }
  ~LogTurn() {
    pthread_mutex_unlock(log_lock);
    is_inside = false;
  }
  LogTurn(const LogTurn&) = delete;
  LogTurn& operator=(const LogTurn&) = delete;
};

bool records() { return is_on && !is_inside; }

int open_log() {
  const int fd = int(syscall(SYS_openat, AT_FDCWD, log_name, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666));
  if (fd < 0) return -1;
  // A high number: programs that close or reuse descriptors begin with the low ones.
  const int high = fcntl(fd, F_DUPFD_CLOEXEC, 900);
  if (high < 0) return fd;
  syscall(SYS_close, fd);
  return high;
}

bool has_log() {
  struct stat status;
  if (log_file >= 0 && syscall(SYS_fstat, log_file, &status) == 0 && status.st_ino == log_inode) return true;
  log_file = open_log();
  if (log_file < 0 || syscall(SYS_fstat, log_file, &status) != 0) return false;
  log_inode = status.st_ino;
  return true;
}

void append(Record record, const char* path = nullptr, const char* second_path = nullptr, const void* data = nullptr) {
  if (!has_log()) return;
  record.pid = uint32_t(getpid());
  record.path_bytes = path ? uint32_t(strlen(path)) : 0;
  record.other_bytes = second_path ? uint32_t(strlen(second_path)) : 0;
  iovec parts[4] = {{&record, sizeof(record)},
                    {const_cast<char*>(path), record.path_bytes},
                    {const_cast<char*>(second_path), record.other_bytes},
                    {const_cast<void*>(data), data ? record.length : 0}};
  int first = 0;
  while (first < 4) {
    const ssize_t written = syscall(SYS_writev, log_file, parts + first, 4 - first);
    if (written < 0) {
      if (errno == EINTR) continue;
      return;
    }
    size_t done = size_t(written);
    while (first < 4 && done >= parts[first].iov_len) done -= parts[first++].iov_len;
    if (first < 4) {
      parts[first].iov_base = static_cast<char*>(parts[first].iov_base) + done;
      parts[first].iov_len -= done;
    }
  }
}

Record record_of(Kind kind, uint64_t inode = 0, uint64_t offset = 0, uint64_t length = 0, uint32_t flags = 0) {
  return Record{kind, 0, inode, offset, length, flags, 0, 0, 0};
}

bool is_below(const char* path) {
  if (strncmp(path, folder, folder_length) != 0) return false;
  if (path[folder_length] == 0) return true;
  if (path[folder_length] != '/') return false;
  const char* rest = path + folder_length + 1;
  for (const char* name = excluded; *name;) {
    const char* end = strchrnul(name, ':');
    const size_t length = size_t(end - name);
    if (length && strncmp(rest, name, length) == 0 && (rest[length] == 0 || rest[length] == '/')) return false;
    name = *end ? end + 1 : end;
  }
  return true;
}

// The path of an open file; false where it has none below the folder, or no more.
bool path_of(int fd, char* path) {
  char link[64];
  snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  const ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
  if (length <= 0) return false;
  path[length] = 0;
  return is_below(path);
}

bool ends_with(const char* text, const char* end) {
  const size_t a = strlen(text), b = strlen(end);
  return a >= b && strcmp(text + a - b, end) == 0;
}

// The inode of an open regular file below the folder; 0: another file, or one that has no name any more.
uint64_t inode_of(int fd) {
  struct stat status;
  if (!records() || syscall(SYS_fstat, fd, &status) != 0 || !S_ISREG(status.st_mode)) return 0;
  char path[PATH_MAX];
  if (!path_of(fd, path) || (status.st_nlink == 0 && ends_with(path, " (deleted)"))) return 0;
  return status.st_ino;
}

// The absolute path of what a call names, without links in its parents; false where it is not below the folder.
bool resolve(int from, const char* path, char* full) {
  if (!path || !*path) return false;
  char joined[PATH_MAX];
  if (path[0] == '/' || from == AT_FDCWD) {
    if (strlen(path) >= sizeof(joined)) return false;
    strcpy(joined, path);
  } else {
    char link[64], parent[PATH_MAX];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", from);
    const ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, parent, PATH_MAX - 1);
    if (length <= 0) return false;
    parent[length] = 0;
    if (size_t(snprintf(joined, sizeof(joined), "%s/%s", parent, path)) >= sizeof(joined)) return false;
  }
  for (size_t n = strlen(joined); n > 1 && joined[n - 1] == '/'; --n) joined[n - 1] = 0;
  char* slash = strrchr(joined, '/');
  const char* name = slash ? slash + 1 : joined;
  if (!*name || strcmp(name, ".") == 0 || strcmp(name, "..") == 0) return realpath(joined, full) && is_below(full);
  char parent[PATH_MAX];
  if (!slash) {
    if (!realpath(".", parent)) return false;
  } else {
    char last_name[NAME_MAX + 1];
    if (strlen(name) > NAME_MAX) return false;
    strcpy(last_name, name);
    *(slash == joined ? slash + 1 : slash) = 0;
    if (!realpath(joined, parent)) return false;
    const int length = snprintf(full, PATH_MAX, "%s/%s", strcmp(parent, "/") == 0 ? "" : parent, last_name);
    return length < PATH_MAX && is_below(full);
  }
  return snprintf(full, PATH_MAX, "%s/%s", strcmp(parent, "/") == 0 ? "" : parent, name) < PATH_MAX && is_below(full);
}

struct Path {
  char full[PATH_MAX];
  bool is_below;
  Path(int from, const char* path) {
    KeepErrno keep;
    is_below = records() && resolve(from, path, full);
  }
};

bool stat_of(const char* path, struct stat* status) {
  return syscall(SYS_newfstatat, AT_FDCWD, path, status, AT_SYMLINK_NOFOLLOW) == 0;
}

// Record what a file holds now, where its writes were not seen.
void append_content(uint64_t inode, int fd) {
  struct stat status;
  if (syscall(SYS_fstat, fd, &status) != 0) return;
  std::vector<char> bytes(size_t(status.st_size));
  size_t have = 0;
  while (have < bytes.size()) {
    const ssize_t n = pread(fd, bytes.data() + have, bytes.size() - have, off_t(have));
    if (n <= 0) break;
    have += size_t(n);
  }
  append(record_of(kTruncate, inode, 0, have));
  append(record_of(kContent, inode, 0, have), nullptr, nullptr, bytes.data());
}

void append_written(int fd, uint64_t inode, uint64_t offset, const void* data, size_t length) {
  append(record_of(kWrite, inode, offset, length), nullptr, nullptr, data);
  const int flags = fcntl(fd, F_GETFL);
  if (flags >= 0 && (flags & O_DSYNC)) append(record_of(kSync, inode));
}

// Record bytes that the kernel copied into a file: they are read back.
void append_copied(int fd, uint64_t inode, uint64_t offset, size_t length) {
  char link[64];
  snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  const int again = int(syscall(SYS_openat, AT_FDCWD, link, O_RDONLY | O_CLOEXEC, 0));
  if (again < 0) return;
  std::vector<char> bytes(length);
  size_t have = 0;
  while (have < length) {
    const ssize_t n = pread(again, bytes.data() + have, length - have, off_t(offset + have));
    if (n <= 0) break;
    have += size_t(n);
  }
  syscall(SYS_close, again);
  append_written(fd, inode, offset, bytes.data(), have);
}

// Record what shared mappings hold: of an inode, or of a range of addresses.
void append_mappings(uint64_t inode, const char* begin, const char* end) {
  std::vector<Mapping> selected;
  {
    std::lock_guard<std::mutex> guard(mappings_lock);
    if (!mappings) return;
    for (const Mapping& each : *mappings) {
      if (inode ? each.inode == inode : each.begin < end && begin < each.begin + each.length) selected.push_back(each);
    }
  }
  for (const Mapping& each : selected) {
    // By a system call: pages behind the file's end are an error of it and no signal.
    std::vector<char> bytes(each.length);
    iovec to{bytes.data(), bytes.size()}, from{each.begin, each.length};
    const ssize_t have = syscall(SYS_process_vm_readv, getpid(), &to, 1, &from, 1, 0);
    if (have > 0) append(record_of(kContent, each.inode, each.offset, uint64_t(have)), nullptr, nullptr, bytes.data());
  }
}

void forget_mappings(const char* begin, const char* end) {
  std::lock_guard<std::mutex> guard(mappings_lock);
  if (!mappings) return;
  for (size_t i = mappings->size(); i-- > 0;) {
    const Mapping& each = (*mappings)[i];
    if (begin <= each.begin && each.begin + each.length <= end) mappings->erase(mappings->begin() + long(i));
  }
}

void copy_variable(const char* name, char* to) {
  const char* value = getenv(name);
  if (value && strlen(value) < PATH_MAX) strcpy(to, value);
}

__attribute__((constructor)) void begin() {
  copy_variable("DISK_RECORDER_FOLDER", folder);
  copy_variable("DISK_RECORDER_LOG", log_name);
  copy_variable("DISK_RECORDER_WITHOUT", excluded);
  folder_length = strlen(folder);
  if (!folder_length || !*log_name || !has_log()) return;
  char name[PATH_MAX + 8];
  snprintf(name, sizeof(name), "%s.turn", log_name);
  const int fd = int(syscall(SYS_openat, AT_FDCWD, name, O_RDWR | O_CLOEXEC, 0));
  if (fd < 0) return;
  void* page = reinterpret_cast<void*>(
      syscall(SYS_mmap, nullptr, sizeof(pthread_mutex_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  syscall(SYS_close, fd);
  if (page == MAP_FAILED) return;
  log_lock = static_cast<pthread_mutex_t*>(page);
  mappings = new std::vector<Mapping>();
  is_on = true;
}

__attribute__((destructor)) void end() {
  if (!records()) return;
  LogTurn turn;
  append_mappings(0, nullptr, reinterpret_cast<const char*>(UINTPTR_MAX));
}

// Calls that open or make files -----------------------------------------------------------------------------------------

int open_file(int from, const char* path, int flags, mode_t mode) {
  if (!(flags & (O_CREAT | O_TRUNC)) || (flags & O_TMPFILE) == O_TMPFILE || !records())
    return int(syscall(SYS_openat, from, path, flags, mode));
  Path place(from, path);
  if (!place.is_below) return int(syscall(SYS_openat, from, path, flags, mode));
  LogTurn turn;
  struct stat old_status, new_status;
  if (stat_of(place.full, &old_status) && S_ISLNK(old_status.st_mode)) {
    char target[PATH_MAX];
    if (realpath(place.full, target)) strcpy(place.full, target);
  }
  const bool existed = stat_of(place.full, &old_status);
  const int fd = int(syscall(SYS_openat, from, path, flags, mode));
  KeepErrno keep;
  if (fd < 0 || syscall(SYS_fstat, fd, &new_status) != 0 || !S_ISREG(new_status.st_mode)) return fd;
  if (!existed)
    append(record_of(kCreate, new_status.st_ino), place.full);
  else if ((flags & O_TRUNC) && old_status.st_size > 0 && is_below(place.full))
    append(record_of(kTruncate, new_status.st_ino));
  return fd;
}

template <typename Make>
int make_unique(const char* name, char* pattern, Make make) {
  if (!records()) return make(name, pattern);
  LogTurn turn;
  const int fd = make(name, pattern);
  KeepErrno keep;
  struct stat status;
  char path[PATH_MAX];
  if (fd >= 0 && syscall(SYS_fstat, fd, &status) == 0 && path_of(fd, path)) append(record_of(kCreate, status.st_ino), path);
  return fd;
}

FILE* open_stream(const char* function, const char* path, const char* mode) {
  const auto real = next<FILE* (*)(const char*, const char*)>(function);
  if (!records() || !mode || (mode[0] == 'r' && !strchr(mode, '+'))) return real(path, mode);
  Path place(AT_FDCWD, path);
  if (!place.is_below) return real(path, mode);
  LogTurn turn;
  struct stat old_status, new_status;
  const bool existed = stat_of(place.full, &old_status);
  FILE* const stream = real(path, mode);
  KeepErrno keep;
  if (!stream || syscall(SYS_fstat, fileno(stream), &new_status) != 0) return stream;
  if (!existed)
    append(record_of(kCreate, new_status.st_ino), place.full);
  else if (mode[0] == 'w' && old_status.st_size > 0)
    append(record_of(kTruncate, new_status.st_ino));
  return stream;
}

// Record what a stream has written, which its own calls inside the C library did not show.
void record_stream(FILE* stream) {
  const int fd = fileno(stream);
  const int flags = fd < 0 ? -1 : fcntl(fd, F_GETFL);
  if (flags < 0 || (flags & O_ACCMODE) == O_RDONLY) return;
  const uint64_t inode = inode_of(fd);
  if (!inode) return;
  char link[64];
  snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  const int again = int(syscall(SYS_openat, AT_FDCWD, link, O_RDONLY | O_CLOEXEC, 0));
  if (again < 0) return;
  {
    LogTurn turn;
    append_content(inode, again);
  }
  syscall(SYS_close, again);
}

// Calls that write ------------------------------------------------------------------------------------------------------

ssize_t write_at(int fd, const void* data, size_t length, off_t offset) {
  const uint64_t inode = inode_of(fd);
  if (!inode) return syscall(SYS_pwrite64, fd, data, length, offset);
  LogTurn turn;
  const ssize_t written = syscall(SYS_pwrite64, fd, data, length, offset);
  KeepErrno keep;
  if (written > 0) append_written(fd, inode, uint64_t(offset), data, size_t(written));
  return written;
}

// offset < 0: at the descriptor's own place.
template <typename Write>
ssize_t write_parts(int fd, const iovec* parts, int count, off_t offset, Write write) {
  const uint64_t inode = inode_of(fd);
  if (!inode) return write();
  LogTurn turn;
  const ssize_t written = write();
  KeepErrno keep;
  if (written <= 0) return written;
  std::vector<char> bytes;
  bytes.reserve(size_t(written));
  for (int i = 0; i < count && bytes.size() < size_t(written); ++i) {
    const char* begin = static_cast<const char*>(parts[i].iov_base);
    bytes.insert(bytes.end(), begin, begin + std::min(parts[i].iov_len, size_t(written) - bytes.size()));
  }
  const off_t begin = offset >= 0 ? offset : lseek(fd, 0, SEEK_CUR) - written;
  append_written(fd, inode, uint64_t(begin), bytes.data(), bytes.size());
  return written;
}

template <typename Copy>
ssize_t copy_to(int fd, const off_t* offset, Copy copy) {
  const uint64_t inode = inode_of(fd);
  if (!inode) return copy();
  LogTurn turn;
  const off_t begin = offset ? *offset : -1;
  const ssize_t copied = copy();
  KeepErrno keep;
  if (copied > 0) {
    append_copied(fd, inode, uint64_t(begin >= 0 ? begin : lseek(fd, 0, SEEK_CUR) - copied), size_t(copied));
  }
  return copied;
}

int resize(int fd, off_t length) {
  const uint64_t inode = inode_of(fd);
  if (!inode) return int(syscall(SYS_ftruncate, fd, length));
  LogTurn turn;
  const int done = int(syscall(SYS_ftruncate, fd, length));
  KeepErrno keep;
  if (done == 0) append(record_of(kTruncate, inode, 0, uint64_t(length)));
  return done;
}

int resize_named(const char* path, off_t length) {
  Path place(AT_FDCWD, path);
  if (!place.is_below) return int(syscall(SYS_truncate, path, length));
  LogTurn turn;
  const int done = int(syscall(SYS_truncate, path, length));
  KeepErrno keep;
  struct stat status;
  if (done == 0 && syscall(SYS_newfstatat, AT_FDCWD, path, &status, 0) == 0)
    append(record_of(kTruncate, status.st_ino, 0, uint64_t(length)));
  return done;
}

int allocate(int fd, int mode, off_t offset, off_t length) {
  const uint64_t inode = inode_of(fd);
  if (!inode) return int(syscall(SYS_fallocate, fd, mode, offset, length));
  LogTurn turn;
  const int done = int(syscall(SYS_fallocate, fd, mode, offset, length));
  KeepErrno keep;
  if (done == 0) append(record_of(kAllocate, inode, uint64_t(offset), uint64_t(length), uint32_t(mode)));
  return done;
}

// Calls that name -------------------------------------------------------------------------------------------------------

int rename_path(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
  Path source(from_folder, from), target(to_folder, to);
  if (!source.is_below && !target.is_below)
    return int(syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
  LogTurn turn;
  const int done = int(syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
  KeepErrno keep;
  struct stat status;
  if (done != 0) return done;
  if (source.is_below && target.is_below) {
    append(record_of(kRename, stat_of(target.full, &status) ? status.st_ino : 0, 0, 0, flags), source.full, target.full);
  } else if (source.is_below) {
    append(record_of(kUnlink), source.full);
  } else if (stat_of(target.full, &status)) {  // a folder comes without what is in it: the reader's comparison says so
    append(record_of(S_ISDIR(status.st_mode) ? kMakeFolder : kCreate, status.st_ino), target.full);
    const int fd = int(syscall(SYS_openat, AT_FDCWD, target.full, O_RDONLY | O_CLOEXEC, 0));
    if (fd >= 0 && S_ISREG(status.st_mode)) append_content(status.st_ino, fd);
    if (fd >= 0) syscall(SYS_close, fd);
  }
  return done;
}

int link_path(int from_folder, const char* from, int to_folder, const char* to, int flags) {
  Path target(to_folder, to);
  if (!target.is_below) return int(syscall(SYS_linkat, from_folder, from, to_folder, to, flags));
  LogTurn turn;
  const int done = int(syscall(SYS_linkat, from_folder, from, to_folder, to, flags));
  KeepErrno keep;
  struct stat status;
  if (done == 0 && stat_of(target.full, &status)) append(record_of(kLink, status.st_ino), target.full);
  return done;
}

int symlink_path(const char* text, int to_folder, const char* to) {
  Path target(to_folder, to);
  if (!target.is_below) return int(syscall(SYS_symlinkat, text, to_folder, to));
  LogTurn turn;
  const int done = int(syscall(SYS_symlinkat, text, to_folder, to));
  KeepErrno keep;
  if (done == 0) append(record_of(kSymlink), target.full, text);
  return done;
}

int remove_path(int from, const char* path, int flags) {
  Path place(from, path);
  if (!place.is_below) return int(syscall(SYS_unlinkat, from, path, flags));
  LogTurn turn;
  const int done = int(syscall(SYS_unlinkat, from, path, flags));
  KeepErrno keep;
  if (done == 0) append(record_of(flags & AT_REMOVEDIR ? kRemoveFolder : kUnlink), place.full);
  return done;
}

int make_folder(int from, const char* path, mode_t mode) {
  Path place(from, path);
  if (!place.is_below) return int(syscall(SYS_mkdirat, from, path, mode));
  LogTurn turn;
  const int done = int(syscall(SYS_mkdirat, from, path, mode));
  KeepErrno keep;
  struct stat status;
  if (done == 0 && stat_of(place.full, &status)) append(record_of(kMakeFolder, status.st_ino), place.full);
  return done;
}

// Calls that make changes durable ---------------------------------------------------------------------------------------

int sync_file(int fd, long number) {
  struct stat status;
  char path[PATH_MAX];
  if (!records() || syscall(SYS_fstat, fd, &status) != 0 || !(S_ISREG(status.st_mode) || S_ISDIR(status.st_mode)) ||
      !path_of(fd, path))
    return int(syscall(number, fd));
  LogTurn turn;
  append_mappings(status.st_ino, nullptr, nullptr);
  append(record_of(kSync, status.st_ino), path);
  return 0;
}

void sync_everything() {
  LogTurn turn;
  append(record_of(kSyncAll));
}

// Open's third argument is there for these flags alone.
mode_t mode_of(int flags, va_list arguments) {
  return (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(arguments, mode_t) : 0;
}

}  // namespace

#define OPEN_FUNCTION(name)                         \
  int name(const char* path, int flags, ...) {      \
    va_list arguments;                              \
    va_start(arguments, flags);                     \
    const mode_t mode = mode_of(flags, arguments);  \
    va_end(arguments);                              \
    return open_file(AT_FDCWD, path, flags, mode);  \
  }
#define OPENAT_FUNCTION(name)                             \
  int name(int from, const char* path, int flags, ...) {  \
    va_list arguments;                                    \
    va_start(arguments, flags);                           \
    const mode_t mode = mode_of(flags, arguments);        \
    va_end(arguments);                                    \
    return open_file(from, path, flags, mode);            \
  }

#pragma GCC visibility push(default)
extern "C" {

// Make the lock of a log, before any program records to it; 0, or an error number.
int disk_recorder_make_turn(const char* path) {
  const int fd = int(syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (fd < 0 || syscall(SYS_ftruncate, fd, sizeof(pthread_mutex_t)) != 0) return errno;
  void* page = reinterpret_cast<void*>(
      syscall(SYS_mmap, nullptr, sizeof(pthread_mutex_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  syscall(SYS_close, fd);
  if (page == MAP_FAILED) return errno;
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);  // a killed process gives its turn back
  return pthread_mutex_init(static_cast<pthread_mutex_t*>(page), &attributes);
}

OPEN_FUNCTION(open)
OPEN_FUNCTION(open64)
OPENAT_FUNCTION(openat)
OPENAT_FUNCTION(openat64)
int __open_2(const char* path, int flags) { return open_file(AT_FDCWD, path, flags, 0); }
int __open64_2(const char* path, int flags) { return open_file(AT_FDCWD, path, flags, 0); }
int __openat_2(int from, const char* path, int flags) { return open_file(from, path, flags, 0); }
int __openat64_2(int from, const char* path, int flags) { return open_file(from, path, flags, 0); }
int creat(const char* path, mode_t mode) { return open_file(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char* path, mode_t mode) { return open_file(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

int mkstemp(char* pattern) {
  return make_unique("mkstemp", pattern, [](const char* name, char* p) { return next<int (*)(char*)>(name)(p); });
}
int mkstemp64(char* pattern) { return mkstemp(pattern); }
int mkostemp(char* pattern, int flags) {
  return make_unique("mkostemp", pattern,
                     [flags](const char* name, char* p) { return next<int (*)(char*, int)>(name)(p, flags); });
}
int mkostemp64(char* pattern, int flags) { return mkostemp(pattern, flags); }
int mkstemps(char* pattern, int tail) {
  return make_unique("mkstemps", pattern,
                     [tail](const char* name, char* p) { return next<int (*)(char*, int)>(name)(p, tail); });
}
int mkstemps64(char* pattern, int tail) { return mkstemps(pattern, tail); }
char* mkdtemp(char* pattern) {
  const auto real = next<char* (*)(char*)>("mkdtemp");
  if (!records()) return real(pattern);
  char* const created = real(pattern);
  if (!created) return created;
  Path place(AT_FDCWD, created);
  KeepErrno keep;
  struct stat status;
  if (place.is_below && stat_of(place.full, &status)) {
    LogTurn turn;
    append(record_of(kMakeFolder, status.st_ino), place.full);
  }
  return created;
}

FILE* fopen(const char* path, const char* mode) { return open_stream("fopen", path, mode); }
FILE* fopen64(const char* path, const char* mode) { return open_stream("fopen64", path, mode); }
int fflush(FILE* stream) {
  const int done = next<int (*)(FILE*)>("fflush")(stream);
  KeepErrno keep;
  if (stream && records()) record_stream(stream);
  return done;
}
int fclose(FILE* stream) {
  if (stream && records()) {
    next<int (*)(FILE*)>("fflush")(stream);
    record_stream(stream);
  }
  return next<int (*)(FILE*)>("fclose")(stream);
}

ssize_t write(int fd, const void* data, size_t length) {
  const iovec only_part{const_cast<void*>(data), length};
  return write_parts(fd, &only_part, 1, -1, [&] { return ssize_t(syscall(SYS_write, fd, data, length)); });
}
ssize_t pwrite(int fd, const void* data, size_t length, off_t offset) { return write_at(fd, data, length, offset); }
ssize_t pwrite64(int fd, const void* data, size_t length, off64_t offset) { return write_at(fd, data, length, offset); }
ssize_t writev(int fd, const iovec* parts, int count) {
  return write_parts(fd, parts, count, -1, [&] { return ssize_t(syscall(SYS_writev, fd, parts, count)); });
}
ssize_t pwritev(int fd, const iovec* parts, int count, off_t offset) {
  return write_parts(fd, parts, count, offset, [&] { return ssize_t(syscall(SYS_pwritev, fd, parts, count, offset, 0)); });
}
ssize_t pwritev64(int fd, const iovec* parts, int count, off64_t offset) { return pwritev(fd, parts, count, offset); }
ssize_t pwritev2(int fd, const iovec* parts, int count, off_t offset, int flags) {
  return write_parts(fd, parts, count, offset,
                     [&] { return ssize_t(syscall(SYS_pwritev2, fd, parts, count, offset, 0, flags)); });
}
ssize_t pwritev64v2(int fd, const iovec* parts, int count, off64_t offset, int flags) {
  return pwritev2(fd, parts, count, offset, flags);
}
ssize_t sendfile(int to, int from, off_t* offset, size_t count) {
  return copy_to(to, nullptr, [&] { return ssize_t(syscall(SYS_sendfile, to, from, offset, count)); });
}
ssize_t sendfile64(int to, int from, off64_t* offset, size_t count) { return sendfile(to, from, offset, count); }
ssize_t copy_file_range(int from, off64_t* from_offset, int to, off64_t* to_offset, size_t length, unsigned flags) {
  return copy_to(to, to_offset, [&] {
    return ssize_t(syscall(SYS_copy_file_range, from, from_offset, to, to_offset, length, flags));
  });
}
ssize_t splice(int from, off64_t* from_offset, int to, off64_t* to_offset, size_t length, unsigned flags) {
  return copy_to(to, to_offset,
                 [&] { return ssize_t(syscall(SYS_splice, from, from_offset, to, to_offset, length, flags)); });
}

int ftruncate(int fd, off_t length) noexcept { return resize(fd, length); }
int ftruncate64(int fd, off64_t length) noexcept { return resize(fd, length); }
int truncate(const char* path, off_t length) noexcept { return resize_named(path, length); }
int truncate64(const char* path, off64_t length) noexcept { return resize_named(path, length); }
int fallocate(int fd, int mode, off_t offset, off_t length) { return allocate(fd, mode, offset, length); }
int fallocate64(int fd, int mode, off64_t offset, off64_t length) { return allocate(fd, mode, offset, length); }
int posix_fallocate(int fd, off_t offset, off_t length) {
  KeepErrno keep;
  return allocate(fd, 0, offset, length) == 0 ? 0 : errno;
}
int posix_fallocate64(int fd, off64_t offset, off64_t length) { return posix_fallocate(fd, offset, length); }

void* mmap(void* address, size_t length, int protection, int flags, int fd, off_t offset) noexcept {
  void* const mapping = reinterpret_cast<void*>(syscall(SYS_mmap, address, length, protection, flags, fd, offset));
  if (mapping == MAP_FAILED || fd < 0 || !(flags & MAP_SHARED) || !(protection & PROT_WRITE)) return mapping;
  KeepErrno keep;
  const uint64_t inode = inode_of(fd);
  if (inode) {
    std::lock_guard<std::mutex> guard(mappings_lock);
    mappings->push_back({static_cast<char*>(mapping), length, inode, uint64_t(offset)});
  }
  return mapping;
}
void* mmap64(void* address, size_t length, int protection, int flags, int fd, off64_t offset) noexcept {
  return mmap(address, length, protection, flags, fd, offset);
}
int munmap(void* address, size_t length) noexcept {
  if (records() && mappings && !mappings->empty()) {
    const char* first = static_cast<char*>(address);
    LogTurn turn;
    append_mappings(0, first, first + length);
    forget_mappings(first, first + length);
  }
  return int(syscall(SYS_munmap, address, length));
}
int msync(void* address, size_t length, int flags) {
  if (records() && mappings && !mappings->empty()) {
    const char* first = static_cast<char*>(address);
    std::vector<uint64_t> inodes;
    {
      std::lock_guard<std::mutex> guard(mappings_lock);
      for (const Mapping& each : *mappings) {
        if (each.begin < first + length && first < each.begin + each.length) inodes.push_back(each.inode);
      }
    }
    if (!inodes.empty()) {
      LogTurn turn;
      append_mappings(0, first, first + length);
      for (const uint64_t inode : inodes) {
        if (flags & MS_SYNC) append(record_of(kSync, inode));
      }
      return 0;
    }
  }
  return int(syscall(SYS_msync, address, length, flags));
}

int rename(const char* from, const char* to) noexcept { return rename_path(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int from_folder, const char* from, int to_folder, const char* to) noexcept {
  return rename_path(from_folder, from, to_folder, to, 0);
}
int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) noexcept {
  return rename_path(from_folder, from, to_folder, to, flags);
}
int link(const char* from, const char* to) noexcept { return link_path(AT_FDCWD, from, AT_FDCWD, to, 0); }
int linkat(int from_folder, const char* from, int to_folder, const char* to, int flags) noexcept {
  return link_path(from_folder, from, to_folder, to, flags);
}
int symlink(const char* text, const char* to) noexcept { return symlink_path(text, AT_FDCWD, to); }
int symlinkat(const char* text, int to_folder, const char* to) noexcept { return symlink_path(text, to_folder, to); }
int unlink(const char* path) noexcept { return remove_path(AT_FDCWD, path, 0); }
int unlinkat(int from, const char* path, int flags) noexcept { return remove_path(from, path, flags); }
int rmdir(const char* path) noexcept { return remove_path(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char* path) noexcept {
  const int done = remove_path(AT_FDCWD, path, 0);
  return done != 0 && (errno == EISDIR || errno == EPERM) ? remove_path(AT_FDCWD, path, AT_REMOVEDIR) : done;
}
int mkdir(const char* path, mode_t mode) noexcept { return make_folder(AT_FDCWD, path, mode); }
int mkdirat(int from, const char* path, mode_t mode) noexcept { return make_folder(from, path, mode); }

int fsync(int fd) { return sync_file(fd, SYS_fsync); }
int fdatasync(int fd) { return sync_file(fd, SYS_fdatasync); }
int syncfs(int fd) noexcept {
  struct stat status, folder_status;
  if (!records() || syscall(SYS_fstat, fd, &status) != 0 || !stat_of(folder, &folder_status) ||
      status.st_dev != folder_status.st_dev)
    return int(syscall(SYS_syncfs, fd));
  sync_everything();
  return 0;
}
void sync() noexcept {
  if (records())
    sync_everything();
  else
    syscall(SYS_sync);
}

}  // extern "C"
#pragma GCC visibility pop
