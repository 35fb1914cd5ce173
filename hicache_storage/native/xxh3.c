#include "xxh3.h"

#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the data plane is written for little-endian machines"
#endif

enum { STRIPE = 64, SECRET_NBYTES = 192, BLOCK_STRIPES = (SECRET_NBYTES - STRIPE) / 8, MIDSIZE_MAX = 240 };

static const uint64_t P32_1 = 0x9E3779B1U;
static const uint64_t P64_1 = 0x9E3779B185EBCA87ULL, P64_2 = 0xC2B2AE3D27D4EB4FULL,
                      P64_3 = 0x165667B19E3779F9ULL, P64_4 = 0x85EBCA77C2B2AE63ULL;
static const uint64_t PMX1 = 0x165667919E3779F9ULL, PMX2 = 0x9FB21C651E98DF25ULL;

static const uint8_t SECRET[SECRET_NBYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t read64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}

static inline void store64(uint8_t *at, uint64_t value) { memcpy(at, &value, 8); }

static inline uint32_t read32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, 4);
    return value;
}

static inline uint64_t fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t rotated(uint64_t value, int bits) { return value << bits | value >> (64 - bits); }

static inline uint64_t avalanche(uint64_t hash) {
    hash ^= hash >> 37;
    hash *= PMX1;
    return hash ^ hash >> 32;
}

static inline uint64_t avalanche_xxh64(uint64_t hash) {
    hash ^= hash >> 33;
    hash *= P64_2;
    hash ^= hash >> 29;
    hash *= P64_3;
    return hash ^ hash >> 32;
}

static inline uint64_t mix16(const uint8_t *data, const uint8_t *secret) {
    return fold(read64(data) ^ read64(secret), read64(data + 8) ^ read64(secret + 8));
}

static uint64_t hash_short(const uint8_t *data, size_t nbytes) {
    if (nbytes > 8) {
        uint64_t low = read64(data) ^ (read64(SECRET + 24) ^ read64(SECRET + 32));
        uint64_t high = read64(data + nbytes - 8) ^ (read64(SECRET + 40) ^ read64(SECRET + 48));
        return avalanche(nbytes + __builtin_bswap64(low) + high + fold(low, high));
    }
    if (nbytes >= 4) {
        uint64_t joined = read32(data + nbytes - 4) + ((uint64_t)read32(data) << 32);
        uint64_t hash = joined ^ (read64(SECRET + 8) ^ read64(SECRET + 16));
        hash ^= rotated(hash, 49) ^ rotated(hash, 24);
        hash *= PMX2;
        hash ^= (hash >> 35) + nbytes;
        hash *= PMX2;
        return hash ^ hash >> 28;
    }
    if (nbytes) {
        uint32_t joined = (uint32_t)data[0] << 16 | (uint32_t)data[nbytes >> 1] << 24 | data[nbytes - 1] |
                          (uint32_t)nbytes << 8;
        return avalanche_xxh64(joined ^ (uint64_t)(read32(SECRET) ^ read32(SECRET + 4)));
    }
    return avalanche_xxh64(read64(SECRET + 56) ^ read64(SECRET + 64));
}

static uint64_t hash_middle(const uint8_t *data, size_t nbytes) {
    uint64_t acc = nbytes * P64_1;
    if (nbytes <= 128) {
        for (size_t i = (nbytes - 1) / 32 + 1; i-- > 0;) {
            acc += mix16(data + 16 * i, SECRET + 32 * i);
            acc += mix16(data + nbytes - 16 * (i + 1), SECRET + 32 * i + 16);
        }
        return avalanche(acc);
    }
    size_t rounds = nbytes / 16;
    for (size_t i = 0; i < 8; i++)
        acc += mix16(data + 16 * i, SECRET + 16 * i);
    acc = avalanche(acc);
    for (size_t i = 8; i < rounds; i++)
        acc += mix16(data + 16 * i, SECRET + 16 * (i - 8) + 3);
    acc += mix16(data + nbytes - 16, SECRET + 136 - 17);
    return avalanche(acc);
}

/* Accumulate `stripes` stripes, of which the first is number `at` of its block; scramble at each block's end.
 * One body for each width of vector. The macros VECTOR, WIDTH, LOAD and so on say which. */
#define ACCUMULATE_BODY                                                                              \
    VECTOR lane[LANES];                                                                              \
    for (int i = 0; i < LANES; i++)                                                                  \
        lane[i] = LOAD((const uint8_t *)acc + i * WIDTH);                                            \
    while (stripes) {                                                                                \
        const size_t count = stripes < BLOCK_STRIPES - at ? stripes : BLOCK_STRIPES - at;            \
        for (size_t n = 0; n < count; n++, data += STRIPE) {                                         \
            __builtin_prefetch(data + 512);                                                          \
            for (int i = 0; i < LANES; i++) {                                                        \
                const VECTOR value = LOAD(data + i * WIDTH);                                         \
                const VECTOR key = XOR(value, LOAD(SECRET + 8 * (at + n) + i * WIDTH));              \
                lane[i] = ADD(lane[i], ADD(SWAP(value), MUL32(key, SHIFT(key, 32))));                \
            }                                                                                        \
        }                                                                                            \
        stripes -= count;                                                                            \
        at += count;                                                                                 \
        if (at == BLOCK_STRIPES) {                                                                   \
            for (int i = 0; i < LANES; i++) {                                                        \
                const VECTOR key = LOAD(SECRET + SECRET_NBYTES - STRIPE + i * WIDTH);                \
                const VECTOR mixed = XOR(XOR(lane[i], SHIFT(lane[i], 47)), key);                     \
                lane[i] = ADD(MUL32(mixed, PRIME), RAISE(MUL32(SHIFT(mixed, 32), PRIME), 32));       \
            }                                                                                        \
            at = 0;                                                                                  \
        }                                                                                            \
    }                                                                                                \
    for (int i = 0; i < LANES; i++)                                                                  \
        STORE((uint8_t *)acc + i * WIDTH, lane[i])
#if defined(__x86_64__)
#include <immintrin.h>

#define VECTOR __m256i
#define WIDTH 32
#define LANES 2
#define LOAD(at) _mm256_loadu_si256((const __m256i *)(at))
#define STORE(at, value) _mm256_storeu_si256((__m256i *)(at), value)
#define XOR _mm256_xor_si256
#define ADD _mm256_add_epi64
#define MUL32 _mm256_mul_epu32
#define SHIFT _mm256_srli_epi64
#define RAISE _mm256_slli_epi64
#define SWAP(value) _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2))
#define PRIME _mm256_set1_epi64x((long long)P32_1)
__attribute__((target("avx2"))) static void accumulate_avx2(uint64_t *acc, const uint8_t *data, size_t stripes,
                                                            size_t at) {
    ACCUMULATE_BODY;
}
#undef VECTOR
#undef WIDTH
#undef LANES
#undef LOAD
#undef STORE
#undef XOR
#undef ADD
#undef MUL32
#undef SHIFT
#undef RAISE
#undef SWAP
#undef PRIME
#endif

#define VECTOR uint64_t
#define WIDTH 8
#define LANES 8
#define LOAD(at) read64(at)
#define STORE(at, value) store64(at, value)
#define XOR(a, b) ((a) ^ (b))
#define ADD(a, b) ((a) + (b))
#define MUL32(a, b) ((uint64_t)(uint32_t)(a) * (uint32_t)(b))
#define SHIFT(a, bits) ((a) >> (bits))
#define RAISE(a, bits) ((a) << (bits))
#define SWAP(value) read64(data + (i ^ 1) * WIDTH)
#define PRIME P32_1
static void accumulate_plain(uint64_t *acc, const uint8_t *data, size_t stripes, size_t at) { ACCUMULATE_BODY; }

static void accumulate(uint64_t *acc, const uint8_t *data, size_t stripes, size_t at) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        accumulate_avx2(acc, data, stripes, at);
        return;
    }
#endif
    accumulate_plain(acc, data, stripes, at);
}

static uint64_t merged(const uint64_t *acc, uint64_t total) {
    uint64_t result = total * P64_1;
    for (int i = 0; i < 4; i++)
        result += fold(acc[2 * i] ^ read64(SECRET + 11 + 16 * i), acc[2 * i + 1] ^ read64(SECRET + 19 + 16 * i));
    return avalanche(result);
}

static void accumulate_last(uint64_t *acc, const uint8_t *stripe) {
    for (int i = 0; i < 8; i++) {
        uint64_t value = read64(stripe + 8 * i);
        uint64_t key = value ^ read64(SECRET + SECRET_NBYTES - STRIPE - 7 + 8 * i);
        acc[i ^ 1] += value;
        acc[i] += (key & 0xFFFFFFFFU) * (key >> 32);
    }
}

void xxh3_begin(xxh3_stream *stream) {
    static const uint64_t start[8] = {0xC2B2AE3DU, 0x9E3779B185EBCA87ULL, 0xC2B2AE3D27D4EB4FULL,
                                      0x165667B19E3779F9ULL, 0x85EBCA77C2B2AE63ULL, 0x85EBCA77U,
                                      0x27D4EB2F165667C5ULL, 0x9E3779B1U};
    memcpy(stream->acc, start, sizeof start);
    stream->pending_nbytes = stream->stripes = 0;
    stream->total = 0;
}

static void consume(xxh3_stream *stream, const uint8_t *data, size_t stripes) {
    accumulate(stream->acc, data, stripes, stream->stripes);
    stream->stripes = (stream->stripes + stripes) % BLOCK_STRIPES;
}

void xxh3_update(xxh3_stream *stream, const void *bytes, size_t nbytes) {
    const uint8_t *data = bytes;
    const size_t room = sizeof stream->pending - stream->pending_nbytes;
    stream->total += nbytes;
    if (nbytes <= room) {
        memcpy(stream->pending + stream->pending_nbytes, data, nbytes);
        stream->pending_nbytes += nbytes;
        return;
    }
    if (stream->pending_nbytes) {
        memcpy(stream->pending + stream->pending_nbytes, data, room);
        data += room;
        nbytes -= room;
        consume(stream, stream->pending, sizeof stream->pending / STRIPE);
        memcpy(stream->tail, stream->pending + sizeof stream->pending - STRIPE, STRIPE);
    }
    /* The last stripe is accumulated another way, so at least one byte stays pending. */
    const size_t stripes = (nbytes - 1) / STRIPE;
    if (stripes) {
        consume(stream, data, stripes);
        memcpy(stream->tail, data + STRIPE * (stripes - 1), STRIPE);
    }
    stream->pending_nbytes = nbytes - STRIPE * stripes;
    memcpy(stream->pending, data + STRIPE * stripes, stream->pending_nbytes);
}

uint64_t xxh3_digest(const xxh3_stream *stream) {
    const size_t left = stream->pending_nbytes;
    if (stream->total <= 16)
        return hash_short(stream->pending, (size_t)stream->total);
    if (stream->total <= MIDSIZE_MAX)
        return hash_middle(stream->pending, (size_t)stream->total);
    uint64_t acc[8];
    uint8_t last[STRIPE];
    memcpy(acc, stream->acc, sizeof acc);
    accumulate(acc, stream->pending, (left - 1) / STRIPE, stream->stripes);
    if (left >= STRIPE) {
        memcpy(last, stream->pending + left - STRIPE, STRIPE);
    } else {
        memcpy(last, stream->tail + left, STRIPE - left);
        memcpy(last + STRIPE - left, stream->pending, left);
    }
    accumulate_last(acc, last);
    return merged(acc, stream->total);
}

uint64_t xxh3_64(const void *data, size_t nbytes) {
    xxh3_stream stream;
    xxh3_begin(&stream);
    xxh3_update(&stream, data, nbytes);
    return xxh3_digest(&stream);
}

void xxh3_128_short(uint8_t digest[16], const void *bytes, size_t nbytes) {
    const uint8_t *data = bytes;
    uint64_t low = nbytes * P64_1, high = 0;
    for (size_t i = (nbytes - 1) / 32 + 1; i-- > 0;) {
        const uint8_t *first = data + 16 * i, *last = data + nbytes - 16 * (i + 1);
        low += mix16(first, SECRET + 32 * i);
        low ^= read64(last) + read64(last + 8);
        high += mix16(last, SECRET + 32 * i + 16);
        high ^= read64(first) + read64(first + 8);
    }
    const uint64_t sum = avalanche(low + high);
    const uint64_t other = 0 - avalanche(low * P64_1 + high * P64_4 + nbytes * P64_2);
    store64(digest, __builtin_bswap64(other));
    store64(digest + 8, __builtin_bswap64(sum));
}
