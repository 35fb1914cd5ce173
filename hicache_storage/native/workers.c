#define _GNU_SOURCE
#include "workers.h"

#include <pthread.h>
#include <signal.h>

void work_together(void *(*work)(void *), void *given, size_t most) {
    pthread_t others[MOST_WORKERS];
    sigset_t all, before;
    size_t count = 0;
    (void)sigfillset(&all); /* signals are for the threads that Python knows */
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    while (count + 1 < most && count + 1 < MOST_WORKERS && !pthread_create(&others[count], NULL, work, given))
        count++;
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    (void)work(given);
    while (count)
        (void)pthread_join(others[--count], NULL);
}
