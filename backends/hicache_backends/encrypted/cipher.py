"""XAES-256-GCM: AES-256-GCM with 192-bit nonces, which are long enough to be drawn at random.

Source: https://c2sp.org/XAES-256-GCM. The key of one message is derived from the long-lived key and
the first half of the nonce, by the key derivation of NIST SP 800-108 over CMAC. The second half is the
GCM nonce of that message.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from hicache_storage.backend_support.revocable import for_each_piece

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.page import Page

NONCE_NBYTES = 24
TAG_NBYTES = 16

_HALF = NONCE_NBYTES // 2
_BLOCK_NBYTES = 16
_BLOCK_BITS = (1 << 128) - 1


class MessageKey(NamedTuple):
    """The AES-256-GCM key and nonce of one message."""

    key: bytes
    nonce: bytes


class PageKey:
    """A key that may seal 2**80 pages at a collision risk of 2**-32. Thread-safe."""

    def __init__(self, key: bytes) -> None:
        self._block_cipher = Cipher(algorithms.AES256(key), modes.ECB())  # noqa: S305 - single blocks
        first = int.from_bytes(self._encrypt_blocks(bytes(_BLOCK_NBYTES)))
        subkey = ((first << 1) & _BLOCK_BITS) ^ (0b10000111 if first >> 127 else 0)
        mask = subkey.to_bytes(_BLOCK_NBYTES)
        self._heads = tuple(
            bytes(a ^ b for a, b in zip(mask, (0, counter, 0x58, 0), strict=False))
            for counter in (1, 2)
        )
        self._mask = int.from_bytes(mask[_BLOCK_NBYTES - _HALF :])

    def message_keys(self, nonces: Sequence[bytes]) -> list[MessageKey]:
        """Return the keys of messages, given their 24-byte nonces."""
        first, second = self._heads
        blocks: list[bytes] = []
        for nonce in nonces:
            masked = (int.from_bytes(nonce[:_HALF]) ^ self._mask).to_bytes(_HALF)
            blocks += (first, masked, second, masked)
        keys = self._encrypt_blocks(b"".join(blocks))
        return [
            MessageKey(keys[place : place + 32], nonce[_HALF:])
            for place, nonce in zip(range(0, len(keys), 32), nonces, strict=True)
        ]

    def _encrypt_blocks(self, blocks: bytes) -> bytes:
        return self._block_cipher.encryptor().update(blocks)


def derive(key: bytes, purpose: bytes, nbytes: int) -> bytes:
    """Derive a key of `nbytes` bytes for one purpose.

    Keys of different purposes reveal nothing about each other.
    """
    return HKDF(SHA256(), length=nbytes, salt=None, info=b"hicache-sealed-v1 " + purpose).derive(
        key
    )


def random_nonces(count: int) -> list[bytes]:
    """Draw random nonces. Each process, forked child and restored snapshot draws different nonces."""
    drawn = os.urandom(NONCE_NBYTES * count)
    return [drawn[n : n + NONCE_NBYTES] for n in range(0, len(drawn), NONCE_NBYTES)]


def seal(message: MessageKey, about: bytes, page: Page, target: memoryview) -> bytes:
    """Encrypt a page into `target`, which is as large. Return the tag, which also covers `about`.

    Raises:
        RevokedError: The memory of the page was revoked.
    """
    encryptor = Cipher(algorithms.AES256(message.key), modes.GCM(message.nonce)).encryptor()
    encryptor.authenticate_additional_data(about)
    next_of = _cut(target)
    for_each_piece(page, lambda piece: encryptor.update_into(piece, next_of(piece.nbytes)))
    encryptor.finalize()
    return encryptor.tag


def unseal(message: MessageKey, about: bytes, tag: bytes, source: memoryview, page: Page) -> bool:
    """Decrypt `source` into a page, which is as large.

    Return False if `source`, the tag or `about` differs from what was sealed. Do not use the page then.

    Raises:
        RevokedError: The memory of the page was revoked.
    """
    decryptor = Cipher(algorithms.AES256(message.key), modes.GCM(message.nonce, tag)).decryptor()
    decryptor.authenticate_additional_data(about)
    next_of = _cut(source)
    for_each_piece(page, lambda piece: decryptor.update_into(next_of(piece.nbytes), piece))
    try:
        decryptor.finalize()
    except InvalidTag:
        return False
    return True


def _cut(memory: memoryview) -> Callable[[int], memoryview]:
    """Return a function that returns the next bytes of `memory`, as many as it is told."""
    start = 0

    def next_of(nbytes: int) -> memoryview:
        nonlocal start
        start += nbytes
        return memory[start - nbytes : start]

    return next_of
