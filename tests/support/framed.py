"""Pages of two small pools, for tests of the page store."""

from __future__ import annotations

from pages import hash_of, space

from hicache_storage.page import Page
from hicache_storage.page_store.results import Transfer

NBYTES = 96
TARGET = space(page_nbytes=NBYTES)
DRAFT = space(page_nbytes=NBYTES, pool="draft")
HASHES = [hash_of(n) for n in range(8)]


def framed(fill: int) -> Page:
    half = NBYTES // 2
    return Page(bytearray([fill]) * half, bytearray([fill + 100]) * half)


def bytes_of(fill: int) -> bytes:
    return bytes([fill]) * (NBYTES // 2) + bytes([fill + 100]) * (NBYTES // 2)


def filled(count: int = 8) -> list[Page]:
    return [framed(number + 1) for number in range(count)]


def empty(count: int = 8) -> list[Page]:
    return [framed(0) for _ in range(count)]


def transfer(pages: list[Page], hashes: list[str] | None = None) -> Transfer:
    return Transfer(TARGET, HASHES[: len(pages)] if hashes is None else hashes, pages)
