"""The keys that the backend uses in the database.

    PREFIX{SPACE:BB}HASH     a page: a string of exactly the page's bytes
    PREFIX{SPACE:BB}         the index of a bucket: a sorted set of page hashes by their expiry
  PREFIXspaces             a hash from key-space id to manifest

BB is the first two digits of the page hash. A cluster chooses the slot by the part in braces. So a page
and its index are on one server, and the 256 buckets of a key space are spread over all servers.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING

from hicache_storage.backend_support.manifest import PAGE_HASH

if TYPE_CHECKING:
    from collections.abc import Sequence

BUCKETS = tuple(f"{number:02x}" for number in range(256))


class SpaceKeys:
    """The keys of one key space."""

    def __init__(self, prefix: str, space_id: str) -> None:
        self._head = f"{prefix}{{{space_id}:"

    def page(self, page_hash: str) -> bytes:
        return f"{self._head}{page_hash[:2]}}}{page_hash}".encode()

    def pages(self, hashes: Sequence[str]) -> list[bytes]:
        return [self.page(page_hash) for page_hash in hashes]

    def index(self, bucket: str) -> bytes:
        return f"{self._head}{bucket}}}".encode()

    def member(self, index: bytes, member: bytes) -> str | None:
        """Return the page hash that a member of an index stands for, or None for a foreign member."""
        page_hash = member.decode(errors="replace")
        is_ours = PAGE_HASH.fullmatch(page_hash) and self.index(page_hash[:2]) == index
        return page_hash if is_ours else None

    @property
    def pattern(self) -> str:
        """The SCAN pattern that matches all keys of the space."""
        return f"{self._head}*"

    @cached_property
    def _page_key_offset(self) -> int:
        return len(self._head) + len("00}")

    def page_hash(self, key: bytes) -> str | None:
        """Return the hash of the page that has this key, or None for an index or a foreign key."""
        page_hash = key[self._page_key_offset :].decode(errors="replace")
        return page_hash if PAGE_HASH.fullmatch(page_hash) and self.page(page_hash) == key else None


def key_of_any_space(prefix: str) -> re.Pattern[bytes]:
    """Return a pattern for the keys of pages and indices. Its group `space` is the key space's id."""
    head = rf"{re.escape(prefix)}\{{(?P<space>[0-9a-f]{{32}}):(?P<bucket>[0-9a-f]{{2}})\}}"
    return re.compile(rf"{head}(?:(?P=bucket)(?:[0-9a-f]{{2}}){{15,63}})?".encode())


def registry(prefix: str) -> bytes:
    """Return the key of the hash that contains the manifests."""
    return f"{prefix}spaces".encode()
