"""The base of adapters for the stores behind third-party vLLM connectors.

Such a connector keeps its pages in a client of its own, and only its worker calls the client. The
client is called here as the worker does: it asks which keys are there, sets what is missing, and gets
into the engine's memory. The engine's memory is a buffer for each page of a call. The kit runs without
a GPU, so the connectors' own copies from and to a GPU are left out.
"""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any, ClassVar

from field.adapter import (
    EQUAL_PARTS_ONLY,
    NO_CHECKSUM,
    NO_CLEAR,
    NO_CONFIG_CHECK,
    NO_DELETE,
    NO_LISTING,
    NO_READ_ONLY,
    AdaptedStorage,
)
from hicache_storage.settings import Field, Settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

POOLS = ("kv", "draft", "draft_indexer", "draft_swa", "indexer", "mamba", "swa")
"""The pools of an engine. Each stands for the KV cache group with its number in this list."""


class ModelSettings(Settings):
    """Settings of the engine, whose ranks hold the shards of key spaces."""

    total_heads: int = Field(default=16, ge=1)
    """The model's KV heads: a shard of `n` is one of `total_heads / n` tensor-parallel ranks."""
    total_layers: int = Field(default=32, ge=1)


class Buffers:
    """The engine's memory for the pages of one call: a buffer for each page."""

    def __init__(self, pages: Sequence[Page], *, filled: bool) -> None:
        self._pages = pages
        self._memory = [
            ctypes.create_string_buffer(page.tobytes() if filled else b"", page.nbytes)
            for page in pages
        ]
        self.addresses = [[ctypes.addressof(memory)] for memory in self._memory]
        self.sizes = [[page.nbytes] for page in pages]

    def copy_out(self, number: int) -> None:
        """Copy a buffer into its page."""
        self._pages[number].copy_from(memoryview(self._memory[number]).cast("B"))


class ConnectorStorage(AdaptedStorage):
    """An adapter for a client whose calls take keys, addresses and sizes. All ranks share one client."""

    absent: ClassVar[Mapping[str, str]] = {
        **NO_CONFIG_CHECK,
        **NO_DELETE,
        **NO_CLEAR,
        **NO_CHECKSUM,
        **NO_LISTING,
        **NO_READ_ONLY,
        **EQUAL_PARTS_ONLY,
    }

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._client: Any = None

    def make_client(self) -> Any:
        """Return a new client, as the connector's worker makes it."""
        raise NotImplementedError(f"{type(self).__name__} has no make_client(self)")

    def key_of(self, space: KeySpace, page_hash: str) -> Any:
        """Return the connector's key of a page."""
        raise NotImplementedError(f"{type(self).__name__} has no key_of(self, space, page_hash)")

    def ask(self, client: Any, keys: list[Any]) -> list[bool]:
        """Return whether each key is there."""
        raise NotImplementedError(f"{type(self).__name__} has no ask(self, client, keys)")

    def move(self, client: Any, verb: str, keys: list[Any], buffers: Buffers) -> list[bool]:
        """Get or set pages. Return whether each call succeeded. `verb` is "get" or "set"."""
        raise NotImplementedError(f"{type(self).__name__} has no move(self, client, verb, ...)")

    def client(self) -> Any:
        """Return the client. The first use makes it."""
        self.ensure_open()
        with self._lock:
            if self._client is None:
                self._client = self.make_client()
            return self._client

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        self.key_of(space, "0" * 64)
        self.client()

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        client = self.client()
        return self.ask(client, [self.key_of(space, one) for one in hashes]) if hashes else []

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        client, buffers = self.client(), Buffers(pages, filled=False)
        keys = [self.key_of(space, one) for one in hashes]
        found = self.move(client, "get", keys, buffers) if keys else []
        for number, hit in enumerate(found):
            if hit:
                buffers.copy_out(number)
        return found

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        """Set the pages that are not there, as the worker does. The others count as set."""
        client = self.client()
        keys = [self.key_of(space, one) for one in hashes]
        there = self.ask(client, keys) if keys else []
        missing = [number for number, found in enumerate(there) if not found]
        if missing:
            buffers = Buffers([pages[number] for number in missing], filled=True)
            stored = self.move(client, "set", [keys[number] for number in missing], buffers)
            for number, done in zip(missing, stored, strict=True):
                there[number] = done
        return there

    def close(self) -> None:
        if not self._closed:
            super().close()
            with self._lock:
                client, self._client = self._client, None
            if client is not None and not self.is_forked_copy:
                client.close()
