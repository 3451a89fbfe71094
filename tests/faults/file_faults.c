// A preloaded library that counts the file operations below a folder and makes one of them go wrong.
//
// FILE_FAULT_FOLDER  only files below this folder count
// FILE_FAULT_AT      the number of the operation, from 1
// FILE_FAULT_ACTION  before | after   kill the process before or after the operation
//                    torn             write half of the bytes, then kill the process
//                    fail:ERRNO       the operation fails once
//                    full:ERRNO       this and every later operation that takes space fails
//                    stop             stop the process (SIGSTOP)
//                    slow:MS          the n-th fsync from a checkpoint's first on takes this long; nothing fails
// FILE_FAULT_NAME    only files count whose path contains this text
// FILE_FAULT_HIT     this file is created when the operation is reached
// FILE_FAULT_RANK    only in the process whose RANK is this
// FILE_FAULT_WHILE   while this file exists, every operation that takes space fails with ENOSPC; the operation
//                    and the action above may be missing then
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NONE, BEFORE, AFTER, TORN, FAIL, FULL, STOP, SLOW };
enum outcome { GO_ON, FAILS, TEARS, KILLS_AFTER };

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static const char *folder, *name_part, *full_while;
static int action, number, at, operations, syncs, is_full;

static void read_environment(void) {
    static const char *names[] = {"", "before", "after", "torn", "fail", "full", "stop", "slow"};
    const char *wanted = getenv("FILE_FAULT_RANK"), *rank = getenv("RANK");
    const char *text = getenv("FILE_FAULT_ACTION"), *when = getenv("FILE_FAULT_AT");
    folder = getenv("FILE_FAULT_FOLDER");
    name_part = getenv("FILE_FAULT_NAME");
    full_while = getenv("FILE_FAULT_WHILE");
    if (!folder || !text || !when || (wanted && (!rank || strcmp(wanted, rank) != 0))) return;
    at = atoi(when);
    const char *colon = strchr(text, ':');
    size_t length = colon ? (size_t)(colon - text) : strlen(text);
    number = colon ? atoi(colon + 1) : 0;
    for (int i = 1; i <= SLOW; i++)
        if (strlen(names[i]) == length && strncmp(text, names[i], length) == 0) action = i;
}

static int is_below(const char *path) {
    pthread_once(&once, read_environment);
    if ((action == NONE && !full_while) || !path || strncmp(path, folder, strlen(folder)) != 0) return 0;
    return !name_part || strstr(path, name_part);
}

// Whether an open file stands below the folder, with its path.
static int is_fd_below_at(int fd, char *path) {
    pthread_once(&once, read_environment);
    if ((action == NONE && !full_while) || fd < 3) return 0;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_below(path);
}

static int is_fd_below(int fd) {
    char path[PATH_MAX];
    return is_fd_below_at(fd, path);
}

// The path of `name` in the open folder `dir`.
static int is_at_below(int dir, const char *name) {
    if (name[0] == '/') return is_below(name);
    if (dir == AT_FDCWD) {
        char path[PATH_MAX];
        return getcwd(path, sizeof path) && is_below(path);
    }
    return is_fd_below(dir);
}

static void note_hit(void) {
    const char *hit = getenv("FILE_FAULT_HIT");
    // Not through `open`, which this library replaces.
    if (hit) syscall(SYS_openat, AT_FDCWD, hit, O_WRONLY | O_CREAT, 0666);
}

// Counts one operation and says what becomes of it.
static enum outcome next(int takes_space) {
    if (takes_space && full_while && syscall(SYS_faccessat, AT_FDCWD, full_while, F_OK) == 0) {
        errno = ENOSPC;
        return FAILS;
    }
    pthread_mutex_lock(&mutex);
    int is_now = action != SLOW && ++operations == at;
    if (is_now && action == FULL) is_full = 1;
    int fails = (is_now && action == FAIL) || (is_full && takes_space);
    pthread_mutex_unlock(&mutex);
    if (fails) {
        errno = number;
        return FAILS;
    }
    if (!is_now) return GO_ON;
    note_hit();
    if (action == BEFORE) kill(getpid(), SIGKILL);
    if (action == STOP) kill(getpid(), SIGSTOP);
    if (action == TORN) return takes_space ? TEARS : (kill(getpid(), SIGKILL), GO_ON);
    return action == AFTER ? KILLS_AFTER : GO_ON;
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name);

#define RUN(takes_space, call, half) \
    enum outcome outcome = next(takes_space); \
    if (outcome == FAILS) return -1; \
    if (outcome == TEARS) { half; kill(getpid(), SIGKILL); } \
    __typeof__(call) result = call; \
    if (outcome == KILLS_AFTER) kill(getpid(), SIGKILL); \
    return result;

ssize_t write(int fd, const void *bytes, size_t length) {
    REAL(ssize_t, write, int, const void *, size_t)
    if (!is_fd_below(fd)) return real(fd, bytes, length);
    RUN(1, real(fd, bytes, length), real(fd, bytes, length / 2))
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(ssize_t, writev, int, const struct iovec *, int)
    if (!is_fd_below(fd)) return real(fd, parts, count);
    RUN(1, real(fd, parts, count), real(fd, parts, count > 1 ? count / 2 : 1))
}

static int synchronise(int (*real)(int), int fd) {
    char path[PATH_MAX];
    if (!is_fd_below_at(fd, path)) return real(fd);
    // Those before the first save are the start's.
    if (action == SLOW && (syncs > 0 || strstr(path, "/step-")) && __sync_add_and_fetch(&syncs, 1) == at)
        usleep((useconds_t)number * 1000);
    RUN(0, real(fd), (void)0)
}

int fsync(int fd) {
    REAL(int, fsync, int)
    return synchronise(real, fd);
}

int fdatasync(int fd) {
    REAL(int, fdatasync, int)
    return synchronise(real, fd);
}

int ftruncate64(int fd, off64_t length) {
    REAL(int, ftruncate64, int, off64_t)
    if (!is_fd_below(fd)) return real(fd, length);
    RUN(0, real(fd, length), (void)0)
}

int rename(const char *from, const char *to) {
    REAL(int, rename, const char *, const char *)
    if (!is_at_below(AT_FDCWD, from) && !is_at_below(AT_FDCWD, to)) return real(from, to);
    RUN(0, real(from, to), (void)0)
}

int mkdir(const char *path, mode_t mode) {
    REAL(int, mkdir, const char *, mode_t)
    if (!is_at_below(AT_FDCWD, path)) return real(path, mode);
    RUN(1, real(path, mode), (void)0)
}

int unlink(const char *path) {
    REAL(int, unlink, const char *)
    if (!is_at_below(AT_FDCWD, path)) return real(path);
    RUN(0, real(path), (void)0)
}

int rmdir(const char *path) {
    REAL(int, rmdir, const char *)
    if (!is_at_below(AT_FDCWD, path)) return real(path);
    RUN(0, real(path), (void)0)
}

int unlinkat(int dir, const char *path, int flags) {
    REAL(int, unlinkat, int, const char *, int)
    if (!is_at_below(dir, path)) return real(dir, path, flags);
    RUN(0, real(dir, path, flags), (void)0)
}

static int open_counted(int (*real)(const char *, int, ...), const char *path, int flags, mode_t mode) {
    if (!(flags & O_CREAT) || !is_at_below(AT_FDCWD, path)) return real(path, flags, mode);
    RUN(1, real(path, flags, mode), (void)0)
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(int, name, const char *, int, ...) \
        mode_t mode = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { \
            va_list list; \
            va_start(list, flags); \
            mode = va_arg(list, mode_t); \
            va_end(list); \
        } \
        return open_counted(real, path, flags, mode); \
    }

OPEN(open)
OPEN(open64)
