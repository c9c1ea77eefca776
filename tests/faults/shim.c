/* Stands between the daemon and libc (LD_PRELOAD): counts calls on files and sockets, and fails, delays or kills at
 * the one that a plan names. The plan's language is in shim.py, which compiles this file.
 *
 * FAULTS_PLAN   rules, separated by ';' or new lines
 * FAULTS_FILE   a file of rules, read again when it changes: faults go on and off in a running daemon
 * FAULTS_LOG    one line per call is appended (columns: `Call` in shim.py)
 * FAULTS_BYTES  with it, what was written under this folder is kept too, in LOG.PID: powercut.py replays it
 *
 * Calls go to the kernel by syscall(2): nothing here allocates memory or looks up symbols.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum call { WRITE, SYNC, OPEN, RENAME, LINK, UNLINK, TRUNCATE, SEND, CALLS };
static const char *const CALL_NAMES[CALLS] = {"write", "sync", "open", "rename", "link", "unlink", "truncate", "send"};

enum action { NOTHING, KILL_BEFORE, KILL_AFTER, KILL_SHORT, FAIL_EIO, FAIL_ENOSPC, SHORT, DELAY, ACTIONS };
static const char *const ACTION_NAMES[ACTIONS] = {"-",   "kill-before", "kill-after", "kill-short",
                                                  "eio", "enospc",      "short",      "delay"};

#define MOST_RULES 64
#define PART 200
struct rule {
    enum call call;
    enum action action;
    long delay_ms;
    unsigned long first, last; /* ordinals of the matching calls that it hits */
    unsigned long seen;
    char part[PART];
};
struct rules {
    int count;
    struct rule all[MOST_RULES];
};

static pthread_mutex_t rules_lock = PTHREAD_MUTEX_INITIALIZER;
static struct rules fixed, switched, reading;
static const char *switch_file, *log_file, *bytes_folder;
static struct stat switch_seen;
static int log_fd = -1, bytes_fd = -1;
static pid_t bytes_pid;
static off_t bytes_at;
static pthread_mutex_t bytes_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_ulong sequence = 1;
static atomic_int ready;

static void complain(const char *what, const char *text) {
    char line[PART + 200];
    int length = snprintf(line, sizeof line, "faults shim: %s: %s\n", what, text);
    syscall(SYS_write, 2, line, (size_t)length);
}

/* One rule, CALL[@PATHPART]:ACTION[:WHEN], into `into`; 0 when it is not one. */
static int read_rule(char *text, struct rule *into) {
    memset(into, 0, sizeof *into);
    char *action = strchr(text, ':');
    if (action == NULL) return 0;
    *action++ = 0;
    char *when = strchr(action, ':');
    if (when != NULL) *when++ = 0;
    char *part = strchr(text, '@');
    if (part != NULL) {
        *part++ = 0;
        if (strlen(part) >= PART) return 0;
        strcpy(into->part, part);
    }
    char *delay = strchr(action, '=');
    if (delay != NULL) {
        *delay++ = 0;
        into->delay_ms = strtol(delay, NULL, 10);
    }
    int call = 0, kind = 1;
    while (call < CALLS && strcmp(text, CALL_NAMES[call]) != 0) call++;
    while (kind < ACTIONS && strcmp(action, ACTION_NAMES[kind]) != 0) kind++;
    if (call == CALLS || kind == ACTIONS || (kind == DELAY) != (delay != NULL)) return 0;
    into->call = call;
    into->action = kind;
    into->first = 1;
    into->last = ULONG_MAX;
    if (when == NULL || strcmp(when, "*") == 0) return 1;
    char *end;
    into->first = strtoul(when, &end, 10);
    if (end == when || into->first == 0) return 0;
    if (strcmp(end, "+") != 0) into->last = into->first;
    return *end == 0 || strcmp(end, "+") == 0;
}

static void read_rules(char *text, struct rules *into) {
    char *rest;
    into->count = 0;
    for (char *one = strtok_r(text, ";\n", &rest); one != NULL; one = strtok_r(NULL, ";\n", &rest)) {
        char said[PART];
        snprintf(said, sizeof said, "%s", one);
        if (into->count == MOST_RULES || !read_rule(one, &into->all[into->count]))
            complain("not a rule, or one too many, left out", said);
        else
            into->count++;
    }
}

/* Called with rules_lock held. */
static void follow_switch_file(void) {
    static char text[16384];
    struct stat now;
    if (switch_file == NULL) return;
    if (syscall(SYS_newfstatat, AT_FDCWD, switch_file, &now, 0) != 0) {
        switched.count = 0;
        memset(&switch_seen, 0, sizeof switch_seen);
        return;
    }
    if (now.st_ino == switch_seen.st_ino && now.st_size == switch_seen.st_size &&
        now.st_mtim.tv_sec == switch_seen.st_mtim.tv_sec && now.st_mtim.tv_nsec == switch_seen.st_mtim.tv_nsec)
        return;
    int fd = (int)syscall(SYS_openat, AT_FDCWD, switch_file, O_RDONLY | O_CLOEXEC, 0);
    if (fd < 0) return;
    long length = syscall(SYS_read, fd, text, sizeof text - 1);
    syscall(SYS_close, fd);
    if (length < 0) return;
    text[length] = 0;
    read_rules(text, &reading);
    switched = reading;
    switch_seen = now;
}

__attribute__((constructor)) static void begin(void) {
    static char plan[16384];
    pthread_mutex_lock(&rules_lock);
    if (!atomic_load(&ready)) {
        const char *given = getenv("FAULTS_PLAN");
        snprintf(plan, sizeof plan, "%s", given == NULL ? "" : given);
        read_rules(plan, &fixed);
        switch_file = getenv("FAULTS_FILE");
        log_file = getenv("FAULTS_LOG");
        bytes_folder = getenv("FAULTS_BYTES");
        if (log_file != NULL) {
            log_fd = (int)syscall(SYS_openat, AT_FDCWD, log_file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
            if (log_fd < 0) complain("cannot open the log", log_file);
        }
        atomic_store(&ready, 1);
    }
    pthread_mutex_unlock(&rules_lock);
}

/* One call on its way: what it is about, what the plan wants, and what the log will say. */
struct step {
    enum call call;
    const char *function;
    enum action action;
    long delay_ms;
    long long began_ns;
    int known; /* about a file, folder or socket that has a name */
    unsigned long ino;
    char path[PATH_MAX];
    const char *other;
};

static void name_socket(int fd, char *path) {
    struct sockaddr_storage at;
    socklen_t size = sizeof at;
    path[0] = 0;
    memset(&at, 0, sizeof at);
    if (getsockname(fd, (struct sockaddr *)&at, &size) != 0) return;
    if (at.ss_family == AF_INET)
        snprintf(path, PATH_MAX, "socket/tcp/%d", ntohs(((struct sockaddr_in *)&at)->sin_port));
    else if (at.ss_family == AF_INET6)
        snprintf(path, PATH_MAX, "socket/tcp/%d", ntohs(((struct sockaddr_in6 *)&at)->sin6_port));
    else if (at.ss_family == AF_UNIX && size > sizeof(sa_family_t)) /* a pair within the process has no name */
        snprintf(path, PATH_MAX, "socket/unix/%s", ((struct sockaddr_un *)&at)->sun_path);
}

static void name_fd(int fd, struct step *step) {
    struct stat facts;
    if (fstat(fd, &facts) != 0) return;
    step->ino = facts.st_ino;
    if (S_ISSOCK(facts.st_mode)) {
        name_socket(fd, step->path);
    } else if (S_ISREG(facts.st_mode) || S_ISDIR(facts.st_mode)) {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        long length = syscall(SYS_readlinkat, AT_FDCWD, link, step->path, sizeof step->path - 1);
        step->path[length < 0 ? 0 : length] = 0;
    }
    step->known = step->path[0] != 0;
}

/* The whole path of one that may be relative to a folder. */
static void name_path(int folder, const char *path, char *into) {
    char base[PATH_MAX / 2] = "";
    if (path[0] != '/') {
        char link[64] = "/proc/self/cwd";
        if (folder != AT_FDCWD) snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        long length = syscall(SYS_readlinkat, AT_FDCWD, link, base, sizeof base - 2);
        base[length < 0 ? 0 : length] = 0;
        strcat(base, "/");
    }
    snprintf(into, PATH_MAX, "%s%s", base, path);
}

static int about(const struct rule *rule, const char *path) {
    size_t part = strlen(rule->part), length = strlen(path);
    if (part == 0) return 1;
    if (rule->part[part - 1] != '$') return strstr(path, rule->part) != NULL;
    return length >= part - 1 && strncmp(path + length - (part - 1), rule->part, part - 1) == 0;
}

static void hit(struct rules *rules, struct step *step) {
    for (int i = 0; i < rules->count; i++) {
        struct rule *rule = &rules->all[i];
        if (rule->call != step->call) continue;
        if (!about(rule, step->path)) continue;
        rule->seen++;
        if (step->action == NOTHING && rule->seen >= rule->first && rule->seen <= rule->last) {
            step->action = rule->action;
            step->delay_ms = rule->delay_ms;
        }
    }
}

static long long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (long long)now.tv_sec * 1000000000LL + now.tv_nsec;
}

static int nobody_asks(void) {
    if (!atomic_load(&ready)) begin();
    return fixed.count == 0 && switch_file == NULL && log_fd < 0;
}

/* Decides what happens to a call that begins. */
static void decide(struct step *step) {
    if (!step->known) return;
    pthread_mutex_lock(&rules_lock);
    follow_switch_file();
    hit(&switched, step);
    hit(&fixed, step);
    pthread_mutex_unlock(&rules_lock);
    step->began_ns = now_ns();
}

static long keep_bytes(const struct iovec *parts, int count, ssize_t written, const char *path) {
    long at = -1;
    if (bytes_folder == NULL || written <= 0 || strncmp(path, bytes_folder, strlen(bytes_folder)) != 0) return at;
    pthread_mutex_lock(&bytes_lock);
    if (bytes_fd < 0 || bytes_pid != getpid()) {
        char name[PATH_MAX];
        bytes_pid = getpid();
        bytes_at = 0;
        snprintf(name, sizeof name, "%s.%d", log_file, (int)bytes_pid);
        bytes_fd = (int)syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    }
    at = bytes_at;
    ssize_t left = written;
    for (int i = 0; i < count && left > 0; i++) {
        size_t length = parts[i].iov_len < (size_t)left ? parts[i].iov_len : (size_t)left;
        if (syscall(SYS_write, bytes_fd, parts[i].iov_base, length) != (long)length) complain("cannot keep bytes", path);
        left -= (ssize_t)length;
        bytes_at += (off_t)length;
    }
    pthread_mutex_unlock(&bytes_lock);
    return at;
}

static void note(struct step *step, long result, int error, long offset, long length, long kept_at) {
    if (log_fd < 0 || !step->known) return;
    char line[2 * PATH_MAX + 400];
    int size = snprintf(line, sizeof line, "%lu\t%lld\t%lld\t%d\t%ld\t%s\t%s\t%s\t%ld\t%d\t%lu\t%ld\t%ld\t%ld\t%s\t%s\n",
                        atomic_fetch_add(&sequence, 1), step->began_ns, now_ns(), (int)getpid(), (long)syscall(SYS_gettid), CALL_NAMES[step->call], step->function,
                        ACTION_NAMES[step->action], result, error, step->ino, offset, length, kept_at, step->path,
                        step->other == NULL ? "" : step->other);
    syscall(SYS_write, log_fd, line, (size_t)size);
}

static void die(void) {
    for (;;) syscall(SYS_kill, getpid(), SIGKILL);
}

/* Before the call: kills, waits; the error to return in place of calling, or 0. */
static int before(struct step *step) {
    if (step->action == KILL_BEFORE) {
        note(step, -1, 0, -1, -1, -1);
        die();
    }
    if (step->action == DELAY) {
        struct timespec pause = {step->delay_ms / 1000, step->delay_ms % 1000 * 1000000L};
        while (nanosleep(&pause, &pause) != 0 && errno == EINTR) {}
    }
    return step->action == FAIL_EIO ? EIO : step->action == FAIL_ENOSPC ? ENOSPC : 0;
}

static void after(struct step *step) {
    if (step->action == KILL_AFTER || step->action == KILL_SHORT) die();
}

static int cut(const struct iovec *parts, int count, struct iovec *into, int room) {
    size_t all = 0, left;
    int used = 0;
    for (int i = 0; i < count; i++) all += parts[i].iov_len;
    left = all > 1 ? all / 2 : all;
    for (; used < count && used < room && left > 0; used++) {
        into[used] = parts[used];
        if (into[used].iov_len > left) into[used].iov_len = left;
        left -= into[used].iov_len;
    }
    return used;
}

static ssize_t written(const char *function, int fd, const struct iovec *parts, int count, off_t at, int flags) {
    struct step step = {.call = WRITE, .function = function};
    struct iovec half[64];
    int quiet = nobody_asks(), error = 0;
    if (!quiet) {
        name_fd(fd, &step);
        if (strncmp(step.path, "socket/", 7) == 0) step.call = SEND;
        decide(&step);
        error = before(&step);
        if (step.action == SHORT || step.action == KILL_SHORT) {
            count = cut(parts, count, half, 64);
            parts = half;
        }
    }
    long result = -1;
    if (error == 0) {
        if (at < 0)
            result = flags ? syscall(SYS_pwritev2, fd, parts, count, -1L, 0L, flags) : syscall(SYS_writev, fd, parts, count);
        else
            result = syscall(SYS_pwritev2, fd, parts, count, (long)at, 0L, flags);
        error = result < 0 ? errno : 0;
    }
    if (!quiet && step.known) {
        long wanted = 0;
        for (int i = 0; i < count; i++) wanted += (long)parts[i].iov_len;
        if (at < 0 && result > 0 && step.call == WRITE) at = lseek(fd, 0, SEEK_CUR) - result;
        note(&step, result, error, at, wanted, keep_bytes(parts, count, result, step.path));
        after(&step);
    }
    errno = error;
    return error != 0 ? -1 : result;
}

ssize_t write(int fd, const void *data, size_t length) {
    struct iovec one = {(void *)data, length};
    return written("write", fd, &one, 1, -1, 0);
}
ssize_t pwrite(int fd, const void *data, size_t length, off_t at) {
    struct iovec one = {(void *)data, length};
    return written("pwrite", fd, &one, 1, at, 0);
}
ssize_t pwrite64(int fd, const void *data, size_t length, off64_t at) {
    struct iovec one = {(void *)data, length};
    return written("pwrite", fd, &one, 1, at, 0);
}
ssize_t writev(int fd, const struct iovec *parts, int count) { return written("writev", fd, parts, count, -1, 0); }
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) {
    return written("pwritev", fd, parts, count, at, 0);
}
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t at) {
    return written("pwritev", fd, parts, count, at, 0);
}
ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t at, int flags) {
    return written("pwritev2", fd, parts, count, at, flags);
}
ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t at, int flags) {
    return written("pwritev2", fd, parts, count, at, flags);
}

static int synced(const char *function, int fd, long number) {
    struct step step = {.call = SYNC, .function = function};
    int quiet = nobody_asks(), error = 0;
    struct stat facts = {0};
    if (!quiet) {
        name_fd(fd, &step);
        if (step.known) fstat(fd, &facts);
        decide(&step);
        error = before(&step);
    }
    if (error == 0 && syscall(number, fd) != 0) error = errno;
    if (!quiet) {
        note(&step, error ? -1 : 0, error, -1, (long)facts.st_size, -1);
        after(&step);
    }
    errno = error;
    return error != 0 ? -1 : 0;
}

int syncfs(int fd) { return synced("syncfs", fd, SYS_syncfs); }
int fsync(int fd) { return synced("fsync", fd, SYS_fsync); }
int fdatasync(int fd) { return synced("fdatasync", fd, SYS_fdatasync); }

static int opened(const char *function, int folder, const char *path, int flags, mode_t mode) {
    struct step step = {.call = OPEN, .function = function};
    int quiet = nobody_asks(), error = 0, fd = -1, existed = 1;
    struct stat facts;
    if (!quiet) {
        name_path(folder, path, step.path);
        step.known = strncmp(step.path, "/proc/", 6) != 0 && strncmp(step.path, "/sys/", 5) != 0 &&
                     strncmp(step.path, "/dev/", 5) != 0;
        existed = syscall(SYS_newfstatat, folder, path, &facts, 0) == 0;
        decide(&step);
        error = before(&step);
    }
    if (error == 0 && (fd = (int)syscall(SYS_openat, folder, path, flags, mode)) < 0) error = errno;
    if (!quiet) {
        if (fd >= 0 && fstat(fd, &facts) == 0) step.ino = facts.st_ino;
        step.other = fd < 0 ? "" : !existed ? "created" : flags & O_TRUNC ? "emptied" : "";
        if ((flags & O_ACCMODE) != O_RDONLY || step.action != NOTHING) note(&step, fd, error, -1, flags, -1);
        after(&step);
    }
    errno = error;
    return fd;
}

#define OPEN_MODE(flags)                                   \
    mode_t mode = 0;                                       \
    if ((flags) & (O_CREAT | (O_TMPFILE & ~O_DIRECTORY))) { \
        va_list rest;                                      \
        va_start(rest, flags);                             \
        mode = va_arg(rest, mode_t);                       \
        va_end(rest);                                      \
    }
int open(const char *path, int flags, ...) {
    OPEN_MODE(flags)
    return opened("open", AT_FDCWD, path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    OPEN_MODE(flags)
    return opened("open", AT_FDCWD, path, flags, mode);
}
int openat(int folder, const char *path, int flags, ...) {
    OPEN_MODE(flags)
    return opened("openat", folder, path, flags, mode);
}
int openat64(int folder, const char *path, int flags, ...) {
    OPEN_MODE(flags)
    return opened("openat", folder, path, flags, mode);
}

static int renamed(enum call call, int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
    struct step step = {.call = call, .function = CALL_NAMES[call], .known = 1};
    long number = call == LINK ? SYS_linkat : SYS_renameat2;
    char target[PATH_MAX];
    struct stat facts;
    int quiet = nobody_asks(), error = 0;
    if (!quiet) {
        name_path(from_folder, from, step.path);
        name_path(to_folder, to, target);
        step.other = target;
        if (syscall(SYS_newfstatat, from_folder, from, &facts, 0) == 0) step.ino = facts.st_ino;
        decide(&step);
        error = before(&step);
    }
    if (error == 0 && syscall(number, from_folder, from, to_folder, to, flags) != 0) error = errno;
    if (!quiet) {
        note(&step, error ? -1 : 0, error, -1, -1, -1);
        after(&step);
    }
    errno = error;
    return error != 0 ? -1 : 0;
}
int rename(const char *from, const char *to) { return renamed(RENAME, AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int a, const char *from, int b, const char *to) { return renamed(RENAME, a, from, b, to, 0); }
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
    return renamed(RENAME, a, from, b, to, flags);
}
int link(const char *from, const char *to) { return renamed(LINK, AT_FDCWD, from, AT_FDCWD, to, 0); }
int linkat(int a, const char *from, int b, const char *to, int flags) {
    return renamed(LINK, a, from, b, to, (unsigned)flags);
}

static int unlinked(int folder, const char *path, int flags) {
    struct step step = {.call = UNLINK, .function = flags & AT_REMOVEDIR ? "rmdir" : "unlink", .known = 1};
    struct stat facts;
    int quiet = nobody_asks(), error = 0;
    if (!quiet) {
        name_path(folder, path, step.path);
        if (syscall(SYS_newfstatat, folder, path, &facts, AT_SYMLINK_NOFOLLOW) == 0) step.ino = facts.st_ino;
        decide(&step);
        error = before(&step);
    }
    if (error == 0 && syscall(SYS_unlinkat, folder, path, flags) != 0) error = errno;
    if (!quiet) {
        note(&step, error ? -1 : 0, error, -1, -1, -1);
        after(&step);
    }
    errno = error;
    return error != 0 ? -1 : 0;
}
int unlink(const char *path) { return unlinked(AT_FDCWD, path, 0); }
int unlinkat(int folder, const char *path, int flags) { return unlinked(folder, path, flags); }

/* ftruncate, and fallocate with its `mode`: both change the size, and both can find the disk full. */
static int resized(const char *function, int fd, int mode, off_t at, off_t length) {
    struct step step = {.call = TRUNCATE, .function = function};
    int quiet = nobody_asks(), error = 0, allocates = strcmp(function, "fallocate") == 0;
    if (!quiet) {
        name_fd(fd, &step);
        decide(&step);
        error = before(&step);
    }
    if (error == 0) {
        long result = allocates ? syscall(SYS_fallocate, fd, mode, at, length) : syscall(SYS_ftruncate, fd, length);
        if (result != 0) error = errno;
    }
    if (!quiet) {
        note(&step, error ? -1 : 0, error, mode, (long)(at + length), -1);
        after(&step);
    }
    errno = error;
    return error != 0 ? -1 : 0;
}
int ftruncate(int fd, off_t length) { return resized("ftruncate", fd, 0, 0, length); }
int ftruncate64(int fd, off64_t length) { return resized("ftruncate", fd, 0, 0, length); }
int fallocate(int fd, int mode, off_t at, off_t length) { return resized("fallocate", fd, mode, at, length); }
int fallocate64(int fd, int mode, off64_t at, off64_t length) { return resized("fallocate", fd, mode, at, length); }
int posix_fallocate(int fd, off_t at, off_t length) { return resized("fallocate", fd, 0, at, length) ? errno : 0; }
int posix_fallocate64(int fd, off64_t at, off64_t length) { return resized("fallocate", fd, 0, at, length) ? errno : 0; }

static ssize_t sent(const char *function, int fd, struct msghdr *message, int flags) {
    struct step step = {.call = SEND, .function = function};
    int quiet = nobody_asks(), error = 0;
    long result = -1;
    if (!quiet) {
        name_fd(fd, &step);
        decide(&step);
        error = before(&step);
    }
    struct msghdr copy = *message;
    struct iovec half[64];
    if (step.action == SHORT || step.action == KILL_SHORT) {
        copy.msg_iovlen = (size_t)cut(message->msg_iov, (int)message->msg_iovlen, half, 64);
        copy.msg_iov = half;
    }
    if (error == 0 && (result = syscall(SYS_sendmsg, fd, &copy, flags)) < 0) error = errno;
    if (!quiet) {
        note(&step, result, error, -1, -1, -1);
        after(&step);
    }
    errno = error;
    return result;
}
ssize_t send(int fd, const void *data, size_t length, int flags) {
    struct iovec one = {(void *)data, length};
    struct msghdr message = {.msg_iov = &one, .msg_iovlen = 1};
    return sent("send", fd, &message, flags);
}
ssize_t sendto(int fd, const void *data, size_t length, int flags, const struct sockaddr *to, socklen_t size) {
    struct iovec one = {(void *)data, length};
    struct msghdr message = {.msg_name = (void *)to, .msg_namelen = size, .msg_iov = &one, .msg_iovlen = 1};
    return sent("sendto", fd, &message, flags);
}
ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    struct msghdr copy = *message;
    return sent("sendmsg", fd, &copy, flags);
}
