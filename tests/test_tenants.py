"""No tenant reaches a page of another tenant by fields of a key space, page hashes or names.

make tenants        # a million attempts
"""

from __future__ import annotations

import itertools
import os
import random
import struct
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hicache_backends.file import FileStorage
from hicache_backends.fsspec.layout import page_name
from hicache_backends.memory import MemoryStorage
from hicache_backends.mooncake.layout import Layout as MooncakeLayout
from hicache_backends.redis import RedisStorage
from hicache_backends.redis.layout import SpaceKeys
from hicache_backends.s3.layout import Layout as S3Layout
from pages import blank, hash_of, page
from sealed_stores import sealed_over
from servers import RedisServer
from tenant_tricks import TEXT_FIELDS, VICTIM, Attacker, made

from hicache_storage.keys import KeySpace, check_page_hashes, namespace_seed, page_hashes
from hicache_storage.storage import HiCacheStorage

ATTEMPTS = int(os.environ.get("TENANT_ATTEMPTS", "4000"))
SEED = int(os.environ.get("TENANT_SEED", "0"))
PAGE_HASH = hash_of(1)
_VOCABULARY = 1 << 20
"""More than the tokens of any known model."""


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[dict[str, HiCacheStorage]]:
    """Return stores of several kinds. Each holds one page of the victim."""
    with (
        RedisServer(tmp_path / "redis") as server,
        MemoryStorage() as memory,
        FileStorage.from_config({"path": str(tmp_path / "kv")}) as file,
        RedisStorage.from_config({"url": server.url}) as redis,
        sealed_over() as encrypted,
    ):
        opened: dict[str, HiCacheStorage]
        opened = {"memory": memory, "file": file, "redis": redis, "encrypted": encrypted}
        for store in opened.values():
            store.open_space(VICTIM)
            assert [True] == store.batch_set(VICTIM, [PAGE_HASH], [page(VICTIM.stored_nbytes)])
        yield opened


def is_allowed(page_hash: Any) -> bool:
    """Return whether the SDK passes a page hash on to a store."""
    try:
        check_page_hashes([page_hash])
    except (TypeError, ValueError):
        return False
    return True


def names_of(prefix: str, space: KeySpace, page_hash: str) -> dict[str, str]:
    """Return the name of a page in each kind of store that gives names."""
    slashed = f"{prefix}/"
    return {
        "redis": SpaceKeys(prefix, space.id).page(page_hash).decode(),
        "s3": S3Layout(slashed).pages(space.id, [page_hash])[0],
        "mooncake": MooncakeLayout(prefix).page(space.id, page_hash),
        "fsspec": f"{slashed}{page_name(space.id, page_hash)}",
        "file": f"{slashed}spaces/{space.id}/{page_hash[:2]}/{page_hash}",
    }


@pytest.mark.timeout(0 if ATTEMPTS > 10_000 else 120)
@pytest.mark.no_cover
def test_no_attempt_reaches_a_page_of_another_tenant(stores: dict[str, HiCacheStorage]) -> None:
    """Each attempt looks up and reads a page in every store. Only the victim has set pages there."""
    attacker, outcomes = Attacker(SEED), Counter[str]()
    for fields, page_hash in itertools.islice(attacker.attempts(PAGE_HASH), ATTEMPTS):
        space = made(fields)
        if space is None or not is_allowed(page_hash):
            outcomes["refused"] += 1
            continue
        outcomes["asked"] += 1
        for name, store in stores.items():
            found = store.batch_exists(space, [page_hash])
            found += store.batch_get(space, [page_hash], [blank(space.stored_nbytes)])
            assert [False, False] == found, (name, space, page_hash)
    for store in stores.values():
        assert [True] == store.batch_exists(VICTIM, [PAGE_HASH])

    print(f"tenants: seed {SEED}, {dict(outcomes)}")  # noqa: T201 - the record of `make tenants`
    assert outcomes["asked"] > ATTEMPTS / 4
    assert outcomes["refused"] > ATTEMPTS / 100


@pytest.mark.timeout(0 if ATTEMPTS > 10_000 else 120)
@pytest.mark.no_cover
def test_no_two_pages_have_one_name() -> None:
    """Two names in a store differ if their prefixes, key spaces or page hashes differ."""
    attacker, ours = Attacker(SEED + 1), names_of("kv", VICTIM, PAGE_HASH)
    tried = 0
    for fields, page_hash in itertools.islice(attacker.attempts(PAGE_HASH), ATTEMPTS):
        space, prefix = made(fields), attacker.prefix("kv")
        if space is None or not is_allowed(page_hash):
            continue
        tried += 1
        names = names_of(prefix, space, page_hash)
        assert [] == [kind for kind in ours if names[kind] == ours[kind]], (
            prefix,
            space,
            page_hash,
        )

    assert tried > ATTEMPTS / 4


def _salts(draw: random.Random) -> tuple[str | None, str | None]:
    parts = ["", "a", "b", "ab", "\0", "\1", "a\0", "Bank", "bank", "Bank ", "\u0412ank", None]
    return draw.choice(parts), draw.choice(parts)


@pytest.mark.timeout(0 if ATTEMPTS > 10_000 else 120)
@pytest.mark.no_cover
def test_no_two_salts_share_a_page_hash() -> None:
    """Pages of one key space that differ in their salt or extra key have different hashes."""
    draw = random.Random(SEED)
    owners: dict[str, int] = {}
    for _ in range(ATTEMPTS):
        salts = _salts(draw)
        tokens = [draw.randrange(draw.choice((2, _VOCABULARY))) for _ in range(8)]
        chain = page_hashes(tokens, 4, namespace_seed(*salts))
        for count, page_hash in enumerate(chain, 1):
            owner = hash((salts, *tokens[: 4 * count]))
            assert owners.setdefault(page_hash[:16], owner) == owner


CARELESS: dict[str, Callable[[KeySpace], object]] = {
    "without the tenant": lambda it: replace(it, tenant="").id,
    "whatever the case of the tenant": lambda it: replace(it, tenant=it.tenant.casefold()).id,
    "whatever the form of characters": lambda it: (
        replace(it, tenant=unicodedata.normalize("NFKC", it.tenant)).id
    ),
    "without space around the tenant": lambda it: replace(it, tenant=it.tenant.strip()).id,
    "by its fields in one text": lambda it: (
        "".join(getattr(it, name) for name in TEXT_FIELDS), it.shard, it.stored_nbytes
    ),
}  # fmt: skip


@pytest.mark.parametrize("identity", CARELESS.values(), ids=CARELESS)
def test_the_attempts_would_reach_a_store_that_is_careless(
    identity: Callable[[KeySpace], object],
) -> None:
    """A store that distinguishes key spaces by less than their id returns a page to some attempt."""
    attempts = itertools.islice(Attacker(0).attempts(PAGE_HASH), 4000)
    reached = [
        fields
        for fields, page_hash in attempts
        if (space := made(fields))
        and page_hash == PAGE_HASH
        and identity(space) == identity(VICTIM)
    ]

    assert reached != []


def test_a_salt_cannot_be_imitated_by_tokens_of_a_vocabulary() -> None:
    """A page of tokens equals the text that a salt's seed hashes only if its tokens are too large.

    Such a page would pass for one with the salt, but engines refuse tokens outside their vocabulary.
    """
    text = b"sglang-cache-namespace-v1"
    words = struct.unpack(f"<{len(text) // 4}I", text[: len(text) // 4 * 4])

    assert min(words) > 500 * _VOCABULARY
