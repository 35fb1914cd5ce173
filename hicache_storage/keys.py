"""The identity of a page: chained prefix hashes and key spaces.

A page is addressed by its key space and its hash. The hash identifies the tokens. The key space holds
everything else that must be equal before one page's bytes may replace another's.
"""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from hicache_storage.scalars import check_integer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

_MAX_NARROW = 0xFFFFFFFF
_MAX_TOKEN = 2**63 - 1
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_PAGE_HASH = re.compile(r"[0-9a-f]{32,128}")


# --- page hashes ---------------------------------------------------------------------------------


def page_hashes(
    tokens: Sequence[int] | np.ndarray[Any, Any],
    page_tokens: int,
    prior: str | None = None,
    *,
    bigram: bool = False,
) -> list[str]:
    """Return the chained SHA-256 of each page of `tokens`, byte-identical to SGLang 0.5.23.

    Each hash covers the hash before it, so equal hashes mean equal prefixes. A last page that is not
    full is hashed like the others. Integer arrays are the fastest input, because a list is converted
    to one first.

    Args:
        tokens: Token ids, 0 to 2**63 - 1. A page with an id above 2**32 - 1 is hashed with 8 bytes a
            token instead of 4.
        page_tokens: The number of tokens in a page.
        prior: The hash of the page before the first one, or a `namespace_seed`.
        bigram: Hash pairs of neighboring tokens, as EAGLE-style servers do. n + 1 tokens make n pairs.

    Raises:
        ValueError: A token is out of range, the page size is below 1, or the prior is not a SHA-256.

    Source: sglang/srt/mem_cache/cpp_utils/hash_binding.cpp.

    Examples:
        >>> first, second = page_hashes([1, 2, 3, 4], page_tokens=2)
        >>> [second] == page_hashes([3, 4], page_tokens=2, prior=first)
        True
    """
    page_tokens = check_integer("page_tokens", page_tokens, least=1)
    digest = _prior_digest(prior)
    words = _words(tokens)
    if words.dtype.itemsize == 4:
        return _narrow_hashes(words, page_tokens, digest, bigram=bigram)
    return _mixed_hashes(words, page_tokens, digest, bigram=bigram)


def namespace_seed(extra_key: str | None = None, cache_salt: str | None = None) -> str | None:
    """Return the `prior` for a request's first page, so that different keys or salts share no pages.

    A server puts the name of a LoRA adapter into `extra_key`. Return None if neither is given.

    Raises:
        ValueError: A text cannot be encoded as UTF-8. JSON allows such text, so a request may have it.

    Source: sglang/srt/mem_cache/utils.py, `storage_namespace_seed`.

    Examples:
        >>> mine = page_hashes([1, 2], page_tokens=2, prior=namespace_seed(cache_salt="tenant-7"))
        >>> mine == page_hashes([1, 2], page_tokens=2)
        False
    """
    if extra_key is None and cache_salt is None:
        return None
    digest = hashlib.sha256(b"sglang-cache-namespace-v1")
    for part in (extra_key, cache_salt):
        if part is None:
            digest.update(b"\0")
        else:
            text = _text("extra_key and cache_salt", part, required=False).encode()
            digest.update(b"\1" + struct.pack("<Q", len(text)) + text)
    return digest.hexdigest()


def check_page_hashes(hashes: Sequence[str]) -> None:
    """Refuse hashes that are not 16 to 64 bytes in lowercase hex. This keeps hostile keys from stores.

    Raises:
        ValueError: The message names the first bad hash.
    """
    for page_hash in hashes:
        if not _PAGE_HASH.fullmatch(page_hash) or len(page_hash) % 2:
            raise ValueError(f"a page hash is 16 to 64 bytes in lowercase hex, not {page_hash!r}")


def _prior_digest(prior: str | None) -> bytes:
    if prior and not _DIGEST.fullmatch(prior):
        raise ValueError(f"prior must be a SHA-256 in hex, not {prior!r}")
    return bytes.fromhex(prior or "")


def _words(tokens: Sequence[int] | np.ndarray[Any, Any]) -> npt.NDArray[Any]:
    """Return the tokens as little-endian words of 4 bytes, or of 8 bytes if any token needs them."""
    import numpy as np  # noqa: PLC0415 - `import hicache_storage` stays fast

    if isinstance(tokens, (list, tuple)):
        try:  # `struct` is three times as fast as numpy's conversion
            return np.frombuffer(struct.pack(f"<{len(tokens)}I", *tokens), dtype="<u4")
        except struct.error:
            pass
    array: npt.NDArray[Any] = np.asarray(tokens)
    if array.ndim != 1:
        raise ValueError(f"tokens must be one-dimensional, not of shape {array.shape}")
    if not array.size:
        return array.astype("<u4")
    if array.dtype.kind not in "iu":
        raise ValueError(f"tokens must be integers from 0 to 2**63 - 1, not {array.dtype}")
    array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    unsigned = array.view(f"<u{array.itemsize}")  # negative numbers become huge ones
    largest = int(unsigned.max())
    if largest > (_MAX_TOKEN if array.dtype.kind == "u" else np.iinfo(array.dtype).max):
        raise ValueError("tokens must be integers from 0 to 2**63 - 1")
    return unsigned.astype("<u4" if largest <= _MAX_NARROW else "<u8", copy=False)


def _narrow_hashes(
    words: npt.NDArray[Any], page_tokens: int, digest: bytes, *, bigram: bool
) -> list[str]:
    """Hash pages whose tokens all fit in 4 bytes, with one call of SHA-256 for each page."""
    sha256 = hashlib.sha256
    units = _units(words, bigram=bigram)
    full = len(units) - len(units) % page_tokens
    page_nbytes = page_tokens * units.itemsize * (2 if bigram else 1)
    bodies: list[bytes] = []
    if full:  # one call splits all pages
        bodies = units[:full].reshape(-1).view(f"V{page_nbytes}").tolist()
    if full < len(units):
        bodies.append(units[full:].tobytes())
    digests = [digest := sha256(digest + body).digest() for body in bodies]
    return list(map(bytes.hex, digests))


def _mixed_hashes(
    words: npt.NDArray[Any], page_tokens: int, digest: bytes, *, bigram: bool
) -> list[str]:
    """Hash pages if some tokens need 8 bytes. Only the pages with such tokens use 8 bytes a token."""
    overlap = int(bigram)  # a bigram page ends with the first token of the next
    hashes: list[str] = []
    for start in range(0, len(words) - overlap, page_tokens):
        page = words[start : start + page_tokens + overlap]
        wide = int(page.max()) > _MAX_NARROW
        body = _units(page if wide else page.astype("<u4"), bigram=bigram).tobytes()
        digest = hashlib.sha256(digest + (b"\xff" if wide else b"") + body).digest()
        hashes.append(digest.hex())
    return hashes


def _units(words: npt.NDArray[Any], *, bigram: bool) -> npt.NDArray[Any]:
    """Return the units that fill a page, one in each row: words, or pairs of neighboring words."""
    import numpy as np  # noqa: PLC0415

    if not bigram:
        return words
    pairs = np.empty((max(len(words) - 1, 0), 2), dtype=words.dtype)
    pairs[:, 0] = words[:-1]
    pairs[:, 1] = words[1:]
    return pairs


# --- key spaces ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The part of the model whose KV a page holds. It does not name the rank that wrote the page.

    Examples:
        >>> Shard(layers=(0, 32), heads=(0, 4)).heads
        (0, 4)
    """

    layers: tuple[int, int]
    """[start, end) of the layers, in absolute numbers."""
    heads: tuple[int, int] | None = None
    """[start, end) of KV heads, or None if every rank holds the same bytes (MLA)."""
    context: tuple[int, int] | None = None
    """(rank, size) under context parallelism."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _range("layers", self.layers))
        if self.heads is not None:
            object.__setattr__(self, "heads", _range("heads", self.heads))
        if self.context is not None:
            rank, size = _pair("context", self.context)
            if rank >= size:
                raise ValueError(
                    f"context must be (rank, size) with rank < size, not {(rank, size)}"
                )
            object.__setattr__(self, "context", (rank, size))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySpace:
    """Everything besides the hash that must be equal before one page's bytes may replace another's.

    If any field differs, the `id` differs. Every page of a key space has exactly `stored_nbytes` bytes.

    Examples:
        >>> space = KeySpace(model="my/model", dtype="bfloat16", layout="page_first", page_tokens=64,
        ...                  page_nbytes=2 << 20, shard=Shard(layers=(0, 32), heads=(0, 8)))
        >>> len(space.id), space == KeySpace.from_manifest(space.manifest())
        (32, True)
    """

    model: str
    """The name under which the model is served, such as "meta-llama/Llama-3.1-8B-Instruct"."""
    dtype: str
    """The logical type, such as "bfloat16" or "float8_e4m3fn", not the uint8 that it is stored as."""
    layout: str
    """The order of the bytes: "layer_first", "page_first", "page_first_direct" or "page_head"."""
    page_tokens: int
    page_nbytes: int
    """The number of payload bytes in one page."""
    shard: Shard
    pool: str = "kv"
    revision: str = ""
    """The revision or fingerprint of the weights."""
    tenant: str = ""
    """The tenant. Tenants never share pages."""
    frame_nbytes: int = 0
    """The bytes of the header in front of the payload, or 0 if there is none."""

    def __post_init__(self) -> None:
        for name in ("model", "dtype", "layout", "pool", "revision", "tenant"):
            required = name not in ("revision", "tenant")
            object.__setattr__(self, name, _text(name, getattr(self, name), required=required))
        for name, least in (("page_tokens", 1), ("page_nbytes", 1), ("frame_nbytes", 0)):
            value = check_integer(name, getattr(self, name), least=least)
            object.__setattr__(self, name, value)
        if not isinstance(cast("Any", self.shard), Shard):
            raise TypeError(f"shard must be a Shard, not {type(self.shard).__name__}")

    @property
    def stored_nbytes(self) -> int:
        """The size of one stored page in bytes: frame and payload."""
        return self.frame_nbytes + self.page_nbytes

    @property
    def id(self) -> str:
        """The identity as 32 hex digits, which differ if any field differs. Safe in paths and URLs."""
        return _space_id(self)

    def manifest(self) -> dict[str, Any]:
        """Return all fields as values that JSON can hold. `from_manifest` reads them back."""
        manifest = asdict(self)
        ranges = manifest["shard"].items()
        return manifest | {"shard": {name: ends and list(ends) for name, ends in ranges}}

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> KeySpace:
        """Return the key space that a manifest describes.

        Raises:
            ValueError: A field is missing, unknown or wrong.
        """
        try:
            values: dict[str, Any] = {**manifest, "shard": Shard(**manifest["shard"])}
            return cls(**values)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the manifest of a key space: {error}") from error


@lru_cache(maxsize=4096)
def _space_id(space: KeySpace) -> str:
    digest = hashlib.sha256(b"hicache-key-space-v1")
    for owner in (space, space.shard):
        for field in fields(owner):
            if field.name != "shard":
                digest.update(_encoded(field.name) + _encoded(getattr(owner, field.name)))
    return digest.hexdigest()[:32]


def _encoded(value: str | int | tuple[int, ...] | None) -> bytes:
    """Return a type tag, a length and the value, so that different values have different encodings."""
    if isinstance(value, tuple):
        body = b"".join(_encoded(item) for item in value)
        return b"t" + struct.pack("<Q", len(body)) + body
    tag = {type(None): b"n", int: b"i", str: b"s"}[type(value)]
    body = b"" if value is None else str(value).encode()
    return tag + struct.pack("<Q", len(body)) + body


def _text(name: str, value: object, *, required: bool) -> str:
    """Return `value` as a plain string, even if it is a numpy string or a member of a string enum."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, not {type(value).__name__}")
    if required and not value:
        raise ValueError(f"{name} must not be empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be text that UTF-8 can hold, not {value!r}") from error
    return str.__str__(value)


def _pair(name: str, value: object) -> tuple[int, int]:
    if not isinstance(value, (tuple, list)) or len(cast("Any", value)) != 2:
        raise TypeError(f"{name} must be a pair of integers, not {value!r}")
    first, second = cast("tuple[object, object]", value)
    return check_integer(name, first, least=0), check_integer(name, second, least=0)


def _range(name: str, value: object) -> tuple[int, int]:
    start, end = _pair(name, value)
    if start >= end:
        raise ValueError(f"{name} must be [start, end) with 0 <= start < end, not {(start, end)}")
    return start, end
