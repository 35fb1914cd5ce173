/* Headers and trailers of pages, byte for byte as page_store/frame.py and the `file` backend define them. */
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

/* Write the bytes of a page hash of `length` lowercase hex digits to `digest`. Return their number, or 0
 * if the text is malformed. */
size_t hash_bytes(uint8_t digest[MOST_HASH_NBYTES], const char *text, size_t length);

typedef struct {
    const uint8_t *space_id; /* SPACE_ID_NBYTES */
    uint64_t payload_nbytes;
    uint64_t checksum;
    int checksummed;
} frame_fields;

/* Write the frame of the page with this hash. */
void frame_build(uint8_t frame[FRAME_NBYTES], const frame_fields *fields, const uint8_t *digest, size_t digest_nbytes);

/* Read checksum and flags from a header as they are. */
void frame_take(const uint8_t header[FRAME_NBYTES], frame_fields *fields);

/* Make the trailer for one write: name, `synced`, token and serial, then the hash of all these. */
void trailer_build(uint8_t *trailer, const uint8_t *name, int synced, const uint8_t *token, uint64_t serial);

#endif
