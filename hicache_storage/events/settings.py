"""Settings of KV events. This module needs no extra."""

from __future__ import annotations

from typing import Literal, TypeAlias

from hicache_storage.settings import Field, Settings

HashFormat: TypeAlias = Literal["int64", "uint64", "bytes"]


class EventSettings(Settings):
    """The object `events`. Fields from SGLang's and vLLM's `--kv-events-config` mean the same here."""

    endpoint: str = Field(min_length=1)
    """The address of the PUB socket."""
    bind: bool | None = None
    """Whether the PUB socket binds the address or connects to it. None: it binds addresses with a
    wildcard (`tcp://*:5557`), of `ipc` and of `inproc`."""
    replay_endpoint: str = ""
    """The address at which a ROUTER socket sends past batches again. "": none."""
    topic: str = ""
    """The first part of each message."""
    max_queue_size: int = Field(default=10_000, ge=1)
    """How many batches may wait for the publisher's thread. Further batches are dropped and counted."""
    buffer_steps: int = Field(default=10_000, ge=1)
    """How many past batches can be sent again."""
    hwm: int = Field(default=100_000, ge=1)
    """How many batches may wait for a slow subscriber. ZeroMQ drops any further batches for it."""
    remembered_pages: int = Field(default=1_000_000, ge=1)
    """How many announced pages are remembered, so that their loss is announced, too."""
    medium: str = "STORAGE"
    """The name of this tier in events."""
    block_hashes: HashFormat | None = None
    """The form of block hashes. None: the engine's own form."""
