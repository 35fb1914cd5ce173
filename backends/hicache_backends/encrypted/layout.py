"""The format of sealed pages, and the names that they have in the other backend.

A sealed page is a header followed by the encrypted page:

    offset  bytes  field
    0       4      magic "HiKS"
    4       2      format version
    6       2      zeros
    8       24     nonce
    32      16     tag
    48      80     key id: one length byte, the id in ASCII, zeros
    128            zeros up to a multiple of the backend's alignment

The tag covers the page, every other byte of the header, the key-space id and the page hash. The other
backend receives encrypted page hashes, and key spaces whose `model` is a sealed manifest. Both are
encrypted without a nonce: a page always gets the same name, and only a holder of the key can make it.
"""

from __future__ import annotations

import json
import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

from hicache_backends.encrypted.cipher import NONCE_NBYTES, TAG_NBYTES, derive
from hicache_backends.encrypted.settings import KEY_ID
from hicache_storage.keys import KeySpace, Shard

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADER_NBYTES = 128

_MAGIC = b"HiKS"
_VERSION = 1
_HEAD = struct.Struct("<4sHH")
_NONCE = slice(_HEAD.size, _HEAD.size + NONCE_NBYTES)
_TAG = slice(_NONCE.stop, _NONCE.stop + TAG_NBYTES)
_KEY_ID = slice(_TAG.stop, HEADER_NBYTES)
_SEALED = "sealed"
_SEALED_MODEL = f"{_SEALED}:"
_LEAST_NAME_NBYTES = 16


class Header:
    """The header of a sealed page: what a reader needs to open it, and what the tag covers."""

    __slots__ = ("key_id", "nonce", "tag")

    def __init__(self, key_id: str, nonce: bytes, tag: bytes) -> None:
        self.key_id, self.nonce, self.tag = key_id, nonce, tag

    @classmethod
    def read(cls, header: memoryview) -> Header | None:
        """Return the parsed header, or None if the bytes are not a header of this version."""
        head = bytes(header[:HEADER_NBYTES])
        end = _KEY_ID.start + 1 + head[_KEY_ID.start]
        key_id = head[_KEY_ID.start + 1 : end].decode("latin-1")
        is_whole = head[: _HEAD.size] == _HEAD.pack(_MAGIC, _VERSION, 0) and not any(head[end:])
        if not is_whole or not KEY_ID.fullmatch(key_id):
            return None
        return cls(key_id, head[_NONCE], head[_TAG])


def write_header(header: memoryview, key_id: str, nonce: bytes) -> None:
    """Fill a header, except for its tag."""
    encoded = key_id.encode()
    padding = bytes(len(header) - _KEY_ID.start - 1 - len(encoded))
    zeros = bytes(TAG_NBYTES)
    header[:] = b"".join(
        (_HEAD.pack(_MAGIC, _VERSION, 0), nonce, zeros, bytes((len(encoded),)), encoded, padding)
    )


def write_tag(header: memoryview, tag: bytes) -> None:
    """Write the tag into a header."""
    header[_TAG] = tag


def authenticated(header: memoryview, identity: bytes) -> bytes:
    """Return the bytes that the tag covers in addition to the page."""
    return b"".join((header[: _TAG.start], header[_TAG.stop :], identity))


def header_nbytes(alignment: int) -> int:
    """Return the header's size for a backend whose segments and sizes need this alignment."""
    return -(-HEADER_NBYTES // alignment) * alignment


def is_sealed(inner: KeySpace) -> bool:
    """Return True if a key space of the backend is the sealed form of another one, under any key."""
    forms = inner.dtype, inner.layout, inner.pool
    return inner.model.startswith(_SEALED_MODEL) and forms == (_SEALED,) * 3


class Names:
    """A translator from key spaces to their sealed forms in the backend, and back. Thread-safe."""

    def __init__(self, key: bytes, header_nbytes: int) -> None:
        self._manifests = AESSIV(derive(key, b"manifests", 64))
        self._page_key = algorithms.AES(derive(key, b"page names", 64))
        self._header_nbytes = header_nbytes

    def sealed_space(self, space: KeySpace) -> SealedSpace:
        """Return the key space that the backend receives instead of `space`."""
        manifest = json.dumps(space.manifest(), ensure_ascii=False, sort_keys=True).encode()
        sealed = urlsafe_b64encode(self._manifests.encrypt(manifest, None)).decode()
        return SealedSpace(
            KeySpace(
                model=_SEALED_MODEL + sealed,
                dtype=_SEALED,
                layout=_SEALED,
                page_tokens=1,
                page_nbytes=self._header_nbytes + space.stored_nbytes,
                shard=Shard(layers=(0, 1)),
                pool=_SEALED,
            ),
            space,
            self._page_key,
        )

    def opened_space(self, inner: KeySpace) -> KeySpace | None:
        """Return the key space whose sealed form is `inner`, or None if this key does not open it."""
        if not inner.model.startswith(_SEALED_MODEL):
            return None
        try:
            sealed = urlsafe_b64decode(inner.model.removeprefix(_SEALED_MODEL))
            space = KeySpace.from_manifest(json.loads(self._manifests.decrypt(sealed, None)))
        except (ValueError, InvalidTag):
            return None
        return space if self.sealed_space(space).inner == inner else None


class SealedSpace:
    """A key space as the backend stores it, and the names of its pages there.

    Immutable, thread-safe.
    """

    __slots__ = ("_id", "_names", "inner", "space")

    def __init__(self, inner: KeySpace, space: KeySpace, page_key: algorithms.AES) -> None:
        self.inner: KeySpace = inner
        self.space: KeySpace = space
        self._id = bytes.fromhex(space.id)
        # XTS preserves the length of a hash. Its tweak is as long as a key-space id.
        self._names = Cipher(page_key, modes.XTS(self._id))

    def names(self, hashes: Sequence[str]) -> list[str]:
        """Return the names that pages have in the backend."""
        names = self._names
        return [names.encryptor().update(bytes.fromhex(each)).hex() for each in hashes]

    def page_hash(self, name: str) -> str | None:
        """Return the page hash that a name stands for, or None if the name is too short."""
        sealed = bytes.fromhex(name)
        if len(sealed) < _LEAST_NAME_NBYTES:
            return None
        return self._names.decryptor().update(sealed).hex()

    def identity(self, page_hash: str) -> bytes:
        """Return the bytes that bind a sealed page to its key space and page hash."""
        return self._id + bytes.fromhex(page_hash)
