"""Convert the rows of vLLM's CPU tier to pages, and vLLM's keys to page hashes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.page import Page
from hicache_storage.page_store.results import Transfer

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from hicache_storage.keys import KeySpace

GROUP_NBYTES = 4
KEY_NBYTES = 32 + GROUP_NBYTES
"""The bytes of a key: a SHA-256, then the number of the group."""


class Rows:
    """The CPU tier's memory. Each chunk has one row, with the bytes of all ranks."""

    def __init__(self, view: memoryview) -> None:
        if view.strides is None:
            raise ValueError("vLLM's view of its CPU tier has no rows")
        self.nbytes = view.strides[0]
        self.memory = view.cast("B")

    def pages(self, chunks: Iterable[int]) -> list[Page]:
        """Return the pages for the rows of `chunks`."""
        nbytes, memory = self.nbytes, self.memory
        starts = (int(chunk) * nbytes for chunk in chunks)
        return [Page.of_views((memory[start : start + nbytes],), nbytes) for start in starts]

    def release(self) -> None:
        """Release the view, so that vLLM can unmap the memory."""
        self.memory.release()


class KeyGroups:
    """The key spaces of vLLM's groups, by the group's number in a key.

    A key is a block hash followed by the number of its group in four bytes. Several groups may use the
    same hash.
    """

    def __init__(self, spaces: Mapping[int, KeySpace]) -> None:
        self.spaces = spaces

    def of_keys(self, keys: Iterable[bytes]) -> list[tuple[KeySpace, list[bytes]]]:
        """Return the keys of each key space.

        Raises:
            ValueError: A key is malformed.
            KeyError: A key belongs to an unknown group.
        """
        of_group: dict[bytes, list[bytes]] = {}  # a dict by key space would be much slower
        for key in keys:
            if len(key) != KEY_NBYTES:
                raise ValueError(
                    f"a key of {len(key)} bytes is not a SHA-256 with a group: pass"
                    " --prefix-caching-hash-algo sha256_cbor, because xxhash is not supported"
                )
            of_group.setdefault(key[-GROUP_NBYTES:], []).append(key)
        return [(self.spaces[int.from_bytes(group, "big")], own) for group, own in of_group.items()]

    def batches(
        self, keys: Collection[bytes], chunks: Iterable[int], rows: Rows
    ) -> tuple[list[list[bytes]], list[Transfer]]:
        """Return the keys and the pages of each key space.

        Raises:
            ValueError: A key is malformed, or there is not exactly one chunk for each key.
            KeyError: A key belongs to an unknown group.
        """
        place = dict(zip(keys, chunks, strict=True))
        of_space = self.of_keys(keys)
        batches = [
            Transfer(space, hashes_of(own), rows.pages([place[key] for key in own]))
            for space, own in of_space
        ]
        return [own for _, own in of_space], batches


def hashes_of(keys: Iterable[bytes]) -> list[str]:
    """Return the page hashes of `keys`."""
    return [key[:-GROUP_NBYTES].hex() for key in keys]
