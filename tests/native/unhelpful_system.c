/* A system that refuses O_DIRECT for open files, and new threads. It is loaded before libc. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <unistd.h>

int fcntl(int fd, int command, ...) {
    va_list rest;
    va_start(rest, command);
    const long given = va_arg(rest, long);
    va_end(rest);
    if (command == F_SETFL && given & O_DIRECT) {
        errno = EINVAL;
        return -1;
    }
    return (int)syscall(SYS_fcntl, fd, command, given);
}

int fcntl64(int fd, int command, ...) __attribute__((alias("fcntl")));

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*work)(void *), void *given) {
    (void)thread, (void)attributes, (void)work, (void)given;
    return EAGAIN;
}
