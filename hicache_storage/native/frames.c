#include "frames.h"

#include <string.h>

#include "files.h"
#include "xxh3.h"

static int digit(char character) {
    if (character >= '0' && character <= '9')
        return character - '0';
    return character >= 'a' && character <= 'f' ? character - 'a' + 10 : -1;
}

size_t hash_bytes(uint8_t digest[MOST_HASH_NBYTES], const char *text, size_t length) {
    if (length % 2 || length < 2 * LEAST_HASH_NBYTES || length > 2 * MOST_HASH_NBYTES)
        return 0;
    for (size_t i = 0; i < length / 2; i++) {
        const int high = digit(text[2 * i]), low = digit(text[2 * i + 1]);
        if (high < 0 || low < 0)
            return 0;
        digest[i] = (uint8_t)(high << 4 | low);
    }
    return length / 2;
}

enum { FLAGS = 6, PAYLOAD = 8, CHECKSUM = 16, SPACE = 24, HASH = 40, SEAL = 120 };

void frame_build(uint8_t frame[FRAME_NBYTES], const frame_fields *fields, const uint8_t *digest, size_t digest_nbytes) {
    memset(frame, 0, FRAME_NBYTES);
    memcpy(frame, "HiKV\1", 5);
    frame[FLAGS] = (uint8_t)fields->checksummed;
    frame[FLAGS + 1] = (uint8_t)(fields->checksummed >> 8);
    memcpy(frame + PAYLOAD, &fields->payload_nbytes, 8);
    memcpy(frame + CHECKSUM, &fields->checksum, 8);
    memcpy(frame + SPACE, fields->space_id, SPACE_ID_NBYTES);
    frame[HASH] = (uint8_t)digest_nbytes;
    memcpy(frame + HASH + 1, digest, digest_nbytes);
    const uint64_t seal = xxh3_64(frame, SEAL);
    memcpy(frame + SEAL, &seal, 8);
}

void frame_take(const uint8_t header[FRAME_NBYTES], frame_fields *fields) {
    fields->checksummed = header[FLAGS] | header[FLAGS + 1] << 8;
    memcpy(&fields->checksum, header + CHECKSUM, 8);
}

void trailer_build(uint8_t *trailer, const uint8_t *name, int synced, const uint8_t *token, uint64_t serial) {
    memcpy(trailer, name, NAME_NBYTES);
    trailer[NAME_NBYTES] = (uint8_t)synced;
    memcpy(trailer + NAME_NBYTES + 1, token, TOKEN_NBYTES);
    memcpy(trailer + NAME_NBYTES + 1 + TOKEN_NBYTES, &serial, SERIAL_NBYTES);
    const uint64_t seal = __builtin_bswap64(xxh3_64(trailer, SEALED_NBYTES));
    memcpy(trailer + SEALED_NBYTES, &seal, sizeof seal);
}
