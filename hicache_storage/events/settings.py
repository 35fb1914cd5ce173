"""The settings of KV events. This module needs no extra."""

from __future__ import annotations

from typing import Literal, TypeAlias

from hicache_storage.settings import Field, Settings

HashFormat: TypeAlias = Literal["int64", "uint64", "bytes"]


class EventSettings(Settings):
    """The object `events`. Fields that SGLang's and vLLM's `--kv-events-config` have mean the same."""

    endpoint: str = Field(min_length=1)
    """The address of the PUB socket."""
    bind: bool | None = None
    """Whether the PUB socket binds the address, or connects to it. None: it binds a wildcard address
    (`tcp://*:5557`), and addresses of `ipc` and `inproc`."""
    replay_endpoint: str = ""
    """The address at which a ROUTER socket sends past batches again; "": there is none."""
    topic: str = ""
    """The first part of each message."""
    max_queue_size: int = Field(default=10_000, ge=1)
    """Batches that wait for the publisher's thread. Further ones are dropped and counted."""
    buffer_steps: int = Field(default=10_000, ge=1)
    """Past batches that can be sent again."""
    hwm: int = Field(default=100_000, ge=1)
    """Batches that wait for a slow subscriber. ZeroMQ drops further ones for this subscriber."""
    remembered_pages: int = Field(default=1_000_000, ge=1)
    """Announced pages whose loss is announced, too."""
    medium: str = "STORAGE"
    """The name of this tier in events."""
    block_hashes: HashFormat | None = None
    """The form of block hashes. None: that of the engine."""
