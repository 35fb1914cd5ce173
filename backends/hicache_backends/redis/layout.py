"""The names of everything that is kept in the database.

    PREFIX{SPACE:BB}HASH     a page: a string of exactly the page's bytes
    PREFIX{SPACE:BB}         the index of a bucket: a sorted set of page hashes by the time they expire
    PREFIXspaces             a hash of key-space id to manifest

BB are the first two digits of the page hash. What is in braces chooses the slot of a cluster, so a page
and its index are on one server, and the 256 buckets of a key space are spread over all of them.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.keys import KeySpace

BUCKETS = tuple(f"{number:02x}" for number in range(256))
_PAGE_HASH = re.compile(rb"[0-9a-f]+")
_MEMBER = re.compile(rb"[0-9a-f]{32,128}")


class SpaceKeys:
    """The keys of one key space."""

    def __init__(self, prefix: str, space: KeySpace) -> None:
        self.space = space
        self._head = f"{prefix}{{{space.id}:"

    def page(self, page_hash: str) -> bytes:
        return f"{self._head}{page_hash[:2]}}}{page_hash}".encode()

    def pages(self, hashes: Sequence[str]) -> list[bytes]:
        return [self.page(page_hash) for page_hash in hashes]

    def index(self, bucket: str) -> bytes:
        return f"{self._head}{bucket}}}".encode()

    def member(self, index: bytes, member: bytes) -> str | None:
        """The hash of the page that a member of an index stands for; None for what is not ours."""
        if not _MEMBER.fullmatch(member) or self.index(member[:2].decode()) != index:
            return None
        return member.decode()

    @property
    def pattern(self) -> str:
        """What SCAN takes to find all of them."""
        return f"{self._head}*"

    @cached_property
    def _page_key_offset(self) -> int:
        return len(self._head) + len("00}")

    def page_hash(self, key: bytes) -> str | None:
        """The hash of the page that has this key; None for an index, and for what is not ours."""
        page_hash = key[self._page_key_offset :]
        if not _PAGE_HASH.fullmatch(page_hash) or self.page(page_hash.decode()) != key:
            return None
        return page_hash.decode()


def registry(prefix: str) -> bytes:
    """The key of the manifests."""
    return f"{prefix}spaces".encode()
