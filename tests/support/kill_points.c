/* Kills this process at its n-th call that opens, changes or closes a file: before the call, or half way
 * through a write. It is loaded before libc. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

static long left; /* calls left until the end; 0: not armed */
static long seen;

void kill_at(long number) {
    left = number;
    seen = 0;
}

long calls_seen(void) { return seen; }

/* Return 1 if the process must end at this call. */
static int is_last(void) {
    seen++;
    return left > 0 && --left == 0;
}

static void end(void) { kill(getpid(), SIGKILL); }

/* `half` holds the arguments of a call that does a part of the work. */
#define IN_FRONT_OF_WRITES(name, parameters, arguments, half)                                                           \
    ssize_t name parameters {                                                                                           \
        static ssize_t(*real) parameters;                                                                               \
        if (!real)                                                                                                      \
            *(void **)&real = dlsym(RTLD_NEXT, #name);                                                                  \
        if (is_last()) {                                                                                                \
            (void)!real half;                                                                                           \
            end();                                                                                                      \
        }                                                                                                               \
        return real arguments;                                                                                          \
    }

IN_FRONT_OF_WRITES(write, (int fd, const void *data, size_t nbytes), (fd, data, nbytes), (fd, data, nbytes / 2))
IN_FRONT_OF_WRITES(pwrite, (int fd, const void *data, size_t nbytes, off_t at), (fd, data, nbytes, at),
                   (fd, data, nbytes / 2, at))
IN_FRONT_OF_WRITES(pwrite64, (int fd, const void *data, size_t nbytes, off64_t at), (fd, data, nbytes, at),
                   (fd, data, nbytes / 2, at))
IN_FRONT_OF_WRITES(pwritev, (int fd, const struct iovec *iov, int pieces, off_t at), (fd, iov, pieces, at),
                   (fd, iov, pieces / 2, at))
IN_FRONT_OF_WRITES(pwritev64, (int fd, const struct iovec *iov, int pieces, off64_t at), (fd, iov, pieces, at),
                   (fd, iov, pieces / 2, at))
IN_FRONT_OF_WRITES(writev, (int fd, const struct iovec *iov, int pieces), (fd, iov, pieces), (fd, iov, pieces / 2))

#define IN_FRONT(type, name, parameters, arguments)                                                                     \
    type name parameters {                                                                                              \
        static type(*real) parameters;                                                                                  \
        if (!real)                                                                                                      \
            *(void **)&real = dlsym(RTLD_NEXT, #name);                                                                  \
        if (is_last())                                                                                                  \
            end();                                                                                                      \
        return real arguments;                                                                                          \
    }

IN_FRONT(int, close, (int fd), (fd))
IN_FRONT(int, rename, (const char *from, const char *to), (from, to))
IN_FRONT(int, renameat, (int a, const char *from, int b, const char *to), (a, from, b, to))
IN_FRONT(int, link, (const char *from, const char *to), (from, to))
IN_FRONT(int, linkat, (int a, const char *from, int b, const char *to, int flags), (a, from, b, to, flags))
IN_FRONT(int, unlink, (const char *path), (path))
IN_FRONT(int, unlinkat, (int fd, const char *path, int flags), (fd, path, flags))
IN_FRONT(int, mkdir, (const char *path, mode_t mode), (path, mode))
IN_FRONT(int, mkdirat, (int fd, const char *path, mode_t mode), (fd, path, mode))
IN_FRONT(int, ftruncate, (int fd, off_t nbytes), (fd, nbytes))
IN_FRONT(int, ftruncate64, (int fd, off64_t nbytes), (fd, nbytes))
IN_FRONT(int, fallocate, (int fd, int mode, off_t at, off_t nbytes), (fd, mode, at, nbytes))
IN_FRONT(int, fallocate64, (int fd, int mode, off64_t at, off64_t nbytes), (fd, mode, at, nbytes))
IN_FRONT(int, flock, (int fd, int operation), (fd, operation))
IN_FRONT(int, futimens, (int fd, const struct timespec times[2]), (fd, times))
IN_FRONT(int, fsync, (int fd), (fd))
IN_FRONT(int, fdatasync, (int fd), (fd))

/* Callers pass the mode only with O_CREAT. Otherwise the kernel ignores the integer that is passed on. */
#define OPEN(name, parameters, arguments)                                                                               \
    int name parameters {                                                                                               \
        static int(*real) parameters;                                                                                   \
        if (!real)                                                                                                      \
            *(void **)&real = dlsym(RTLD_NEXT, #name);                                                                  \
        va_list rest;                                                                                                   \
        va_start(rest, flags);                                                                                          \
        const int mode = va_arg(rest, int);                                                                             \
        va_end(rest);                                                                                                   \
        if (is_last())                                                                                                  \
            end();                                                                                                      \
        return real arguments;                                                                                          \
    }

OPEN(open, (const char *path, int flags, ...), (path, flags, mode))
OPEN(open64, (const char *path, int flags, ...), (path, flags, mode))
OPEN(openat, (int fd, const char *path, int flags, ...), (fd, path, flags, mode))
OPEN(openat64, (int fd, const char *path, int flags, ...), (fd, path, flags, mode))
