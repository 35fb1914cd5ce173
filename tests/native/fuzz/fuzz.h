/* Random inputs, each from a seed of its own, and the main function that runs them.
 *
 * A harness includes the sources that it tests, with its own functions in place of the system calls. It defines
 * `run_input`. The program takes the number of inputs and the first seed; a finding prints the seed of its input. */
#ifndef HICACHE_FUZZ_H
#define HICACHE_FUZZ_H

#include <inttypes.h>
#include <sanitizer/common_interface_defs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

static uint64_t input_seed, random_state;

static void run_input(void);
void __ubsan_on_report(void);

/* The next number of SplitMix64. */
static uint64_t random64(void) {
    uint64_t mixed = random_state += 0x9E3779B97F4A7C15ULL;
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9ULL;
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EBULL;
    return mixed ^ mixed >> 31;
}

static size_t below(size_t limit) { return (size_t)(random64() % limit); }

static int one_in(size_t times) { return !below(times); }

static void fill_random(uint8_t *bytes, size_t nbytes) {
    for (size_t at = 0; at < nbytes; at += 8) {
        const uint64_t value = random64();
        memcpy(bytes + at, &value, nbytes - at < 8 ? nbytes - at : 8);
    }
}

/* Allocate exactly `nbytes`, so that the sanitizer finds an access to the first byte after them. */
static void *allocate(size_t nbytes) {
    void *memory = malloc(nbytes);
    if (!memory)
        abort();
    return memory;
}

/* Copy up to `limit` bytes into buffers, as a read does. Return how many. */
static inline size_t scatter(const struct iovec *iov, size_t pieces, const void *bytes, size_t limit) {
    size_t done = 0;
    for (size_t i = 0; i < pieces && done < limit; i++) {
        const size_t step = iov[i].iov_len < limit - done ? iov[i].iov_len : limit - done;
        memcpy(iov[i].iov_base, (const uint8_t *)bytes + done, step);
        done += step;
    }
    return done;
}

static void print_seed(void) { fprintf(stderr, "the seed of this input: %" PRIu64 "\n", input_seed); }

/* UBSan's runtime calls this function, and ASan's runtime calls the callback. */
void __ubsan_on_report(void) { print_seed(); }

#define EXPECT(fact)                                                                                \
    do {                                                                                            \
        if (!(fact)) {                                                                              \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #fact);                      \
            print_seed();                                                                           \
            exit(1);                                                                                \
        }                                                                                           \
    } while (0)

int main(int count, char **arguments) {
    const uint64_t inputs = count > 1 ? strtoull(arguments[1], NULL, 10) : 1;
    const uint64_t first = count > 2 ? strtoull(arguments[2], NULL, 10) : 0;
    __sanitizer_set_death_callback(print_seed);
    for (input_seed = first; input_seed < first + inputs; input_seed++) {
        random_state = input_seed * 0xD1342543DE82EF95ULL;
        run_input();
    }
    return 0;
}

#endif
