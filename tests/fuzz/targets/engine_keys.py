"""Keys and tokens of engines: equal identities only for equal facts, and well-formed hashes."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from fuzz.choices import Choices
from pages import space

from hicache_storage.errors import ConfigError
from hicache_storage.integrations.lmcache._identity import Identity, page_hash
from hicache_storage.integrations.lmcache._object_layouts import Layouts, UnknownLayoutError
from hicache_storage.integrations.vllm._rows import KEY_NBYTES, KeyGroups, Rows
from hicache_storage.keys import check_page_hashes, namespace_seed, page_hashes
from hicache_storage.request_log.trace import block_id

_MAX_TOKEN = 2**63 - 1
_SPACES = {0: space(), 1: space(pool="draft"), 2**32 - 1: space(pool="last")}
_SHAPES = ((2, 3, 16, 64), (1, 3, 16, 576), (3, 16, 64), (16, 64), (64,), (0, 3, 16, 64))

SEEDS = (
    b"",
    *(bytes([kind, n, n, 32]) + bytes(range(80)) for kind in range(4) for n in (0, 1, 2)),
)
TOKENS = (b"\0\0\0\1", b"\xff\xff\xff\xff", b"@", b";", b"=", bytes(32))


@dataclass(frozen=True, slots=True)
class _Dtype:
    name: str
    itemsize: int

    def __str__(self) -> str:
        return f"torch.{self.name}"


_DTYPES = (_Dtype("bfloat16", 2), _Dtype("float16", 2), _Dtype("uint8", 1))


@dataclass(frozen=True, slots=True)
class _Key:
    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int
    cache_salt: str


def check(data: bytes) -> None:
    choices = Choices(data)
    _CHECKS[choices.integer(0, len(_CHECKS) - 1)](choices)


def _tokens(choices: Choices) -> None:
    """Assert that page hashes agree with their definition, computed token by token."""
    page_tokens, is_bigram = choices.integer(0, 5), choices.flag()
    prior = choices.pick((None, "", "ab" * 32, "AB" * 32, "ab" * 31, "x" * 64))
    widths = [choices.pick((1, 4, 5, 8)) for _ in range(choices.integer(0, 12))]
    tokens = [int.from_bytes(choices.chunk(width), "little") for width in widths]
    if choices.flag() and tokens:
        tokens[0] = choices.pick((-1, _MAX_TOKEN, _MAX_TOKEN + 1, 2**64, 2**32 - 1, 2**32))
    is_right = page_tokens > 0 and prior not in ("ab" * 31, "x" * 64)
    is_right = is_right and all(0 <= token <= _MAX_TOKEN for token in tokens)
    try:
        found = page_hashes(tokens, page_tokens, prior, bigram=is_bigram)
    except (ValueError, OverflowError) as error:
        assert isinstance(error, ValueError)
        assert not is_right
        return

    assert is_right
    assert found == _defined_hashes(tokens, page_tokens, prior, is_bigram=is_bigram)
    check_page_hashes(found)
    if tokens:
        assert found == page_hashes(np.array(tokens), page_tokens, prior, bigram=is_bigram)
    assert all(0 <= block_id(one) < 2**54 for one in found)
    assert [block_id(one) for one in found] == [block_id(bytes.fromhex(one)) for one in found]


def _defined_hashes(
    tokens: list[int], page_tokens: int, prior: str | None, *, is_bigram: bool
) -> list[str]:
    """Return the hashes as `page_hashes` defines them: per page a SHA-256 that covers the one before."""
    count = max(len(tokens) - 1, 0) if is_bigram else len(tokens)
    digest, hashes = bytes.fromhex(prior or ""), list[str]()
    for start in range(0, count, page_tokens):
        end = min(start + page_tokens, count)
        if is_bigram:
            words = [token for at in range(start, end) for token in tokens[at : at + 2]]
        else:
            words = tokens[start:end]
        wide = max(words) > 0xFFFFFFFF
        body = struct.pack(f"<{len(words)}{'Q' if wide else 'I'}", *words)
        digest = hashlib.sha256(digest + (b"\xff" if wide else b"") + body).digest()
        hashes.append(digest.hex())
    return hashes


def _seeds(choices: Choices) -> None:
    """Assert that the seeds of two namespaces are equal only if all parts of the namespaces are."""
    parts: list[tuple[str | None, str | None]] = [
        (choices.pick((None, choices.text())), choices.pick((None, choices.text())))
        for _ in range(2)
    ]
    try:
        seeds = [namespace_seed(*each) for each in parts]
    except ValueError:
        assert any(
            "\udc80" <= one <= "\udcff" for each in parts for text in each for one in text or ""
        )
        return
    assert (parts[0] == parts[1]) == (seeds[0] == seeds[1])
    assert all(seed is None or page_hashes([1], 1, seed) for seed in seeds)


def _vllm_keys(choices: Choices) -> None:
    """Assert that each of vLLM's keys is in the batch of its group, with its own row."""
    keys = [
        choices.patched(
            bytes(choices.pick((32, 32, 31))) + choices.pick((b"\0\0\0\1", b"\0\0\0\0")), 2
        )
        for _ in range(choices.integer(0, 4))
    ]
    chunks = [choices.integer(0, 3) for _ in range(choices.pick((len(keys), len(keys), 1)))]
    memory = bytearray(range(64))
    groups = KeyGroups(_SPACES)
    rows = Rows(memoryview(memory).cast("B", (4, 16)))
    try:
        owned, batches = groups.batches(keys, chunks, rows)
    except ValueError:
        assert len(keys) != len(chunks) or any(len(key) != KEY_NBYTES for key in keys)
        return
    except KeyError:
        assert any(int.from_bytes(key[-4:], "big") not in _SPACES for key in keys)
        return
    assert sorted(keys) == sorted(key for own in owned for key in own)
    place = dict(zip(keys, chunks, strict=True))
    for own, batch in zip(owned, batches, strict=True):
        check_page_hashes(batch.hashes)
        assert [key[:-4].hex() for key in own] == list(batch.hashes)
        for key, page in zip(own, batch.pages, strict=True):
            assert batch.space is _SPACES[int.from_bytes(key[-4:], "big")]
            assert page.tobytes() == memory[16 * place[key] : 16 * place[key] + 16]


def _lmcache_keys(choices: Choices) -> None:
    """Assert that the key spaces of two objects differ if any fact about their bytes differs."""
    described = [_described(choices) for _ in range(2)]
    if None in described:
        return
    facts, ids = zip(*(each for each in described if each), strict=True)
    assert (facts[0] == facts[1]) == (ids[0] == ids[1])


def _described(choices: Choices) -> tuple[Any, str] | None:
    """Return the facts about an object and the id of its key space, or None if it is refused."""
    key = _Key(
        chunk_hash=choices.chunk(70),
        model_name=choices.text(8),
        kv_rank=choices.integer(0, 2**32 - 1),
        object_group_id=choices.integer(0, 3),
        cache_salt=choices.text(6).replace("@", ""),  # LMCache's salts have no "@"
    )
    identity = Identity(choices.text(4), choices.text(6), choices.pick(("", "0/2", "1/2")))
    shapes = [choices.pick(_SHAPES) for _ in range(choices.integer(1, 2))]
    dtypes = [choices.pick(_DTYPES) for _ in shapes]
    kv_dtype = choices.pick(("", "float8_e4m3fn", "uint8"))
    nbytes = sum(
        math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    memory: Any = _memory(shapes, dtypes, nbytes + choices.pick((0, 0, 0, 1)))
    try:
        layout = Layouts(kv_dtype).of_object(key, memory)
        check_page_hashes([page_hash(key)])
        space_id = identity.space(key, layout).id
    except (UnknownLayoutError, ConfigError):
        return None
    except ValueError:
        texts = (key.model_name, key.cache_salt, identity.revision, identity.tenant)
        assert not key.model_name or not nbytes or any(not _is_utf8(text) for text in texts)
        return None
    facts = (
        (key.model_name, key.kv_rank, key.object_group_id, key.cache_salt, layout.parts),
        (identity.revision, identity.tenant, identity.server),
    )
    return facts, space_id


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= one <= "\udfff" for one in text)


def _memory(shapes: Sequence[Sequence[int]], dtypes: Sequence[_Dtype], nbytes: int) -> Any:
    return SimpleNamespace(
        meta=SimpleNamespace(shapes=shapes),
        get_size=lambda: nbytes,
        get_shapes=lambda: shapes,
        get_dtypes=lambda: dtypes,
    )


_CHECKS = (_tokens, _seeds, _vllm_keys, _lmcache_keys)
