/* The headers and trailers of pages, byte by byte as page_store/frame.py and the `file` backend define them. */
#ifndef HICACHE_FRAMES_H
#define HICACHE_FRAMES_H

#include <stddef.h>
#include <stdint.h>

enum {
    FRAME_NBYTES = 128,
    SPACE_ID_NBYTES = 16,
    LEAST_HASH_NBYTES = 16,
    MOST_HASH_NBYTES = 64,
    PREFIX_NBYTES = 24,
    TOKEN_NBYTES = 8,
    SERIAL_NBYTES = 7,
};

/* Write the bytes of a page hash, lowercase hex of `length` digits, to `digest`; return their number, 0 where it is none. */
size_t hash_bytes(uint8_t digest[MOST_HASH_NBYTES], const char *text, size_t length);

typedef struct {
    const uint8_t *space_id; /* SPACE_ID_NBYTES */
    uint64_t payload_nbytes;
    uint64_t checksum;
    int checksummed;
} frame_fields;

/* Write the frame of the page of this hash. */
void frame_build(uint8_t frame[FRAME_NBYTES], const frame_fields *fields, const uint8_t *digest, size_t digest_nbytes);

/* Take checksum and flags as they are in a header. */
void frame_take(const uint8_t header[FRAME_NBYTES], frame_fields *fields);

/* Write the trailer of one write: name, `synced`, token and serial, and the hash of all that. */
void trailer_build(uint8_t *trailer, const uint8_t *name, int synced, const uint8_t *token, uint64_t serial);

#endif
