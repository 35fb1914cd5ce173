"""Pages whose owner takes their memory back."""

from __future__ import annotations

from pages import page

from hicache_storage.backend_support.revocable import AtomicRevocable
from hicache_storage.page import Page


def lent_page(
    nbytes: int, seed: int | None = None, revocable: AtomicRevocable | None = None
) -> Page:
    """Return a revocable page of two unaligned segments. It holds the bytes of `seed`, or only 0xa5."""
    data = page(nbytes, seed).tobytes() if seed is not None else b"\xa5" * nbytes
    made = Page(bytearray(data[:999]), bytearray(data[999:]))
    made.revocable = revocable or AtomicRevocable()
    return made


def revoked() -> AtomicRevocable:
    """Return a revocable that refuses every access."""
    made = AtomicRevocable()
    made.revoke()
    return made
