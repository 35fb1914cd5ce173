"""Messages in the encoding of SGLang and vLLM: msgpack maps with a `type`, in one array for each batch.

Source: vllm/distributed/kv_events.py, sglang/srt/disaggregation/kv_events.py. Messages have the fields
that both engines have, and `lora_name`, which vLLM requires.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import msgspec

if TYPE_CHECKING:
    from hicache_storage.events.settings import HashFormat

BlockHash: TypeAlias = int | bytes


class Event(msgspec.Struct, tag=True, gc=False):
    """The base class of all events."""


class BlockStored(Event):
    """The storage now holds these blocks. Their tokens and parents are in the engine's own events."""

    block_hashes: list[BlockHash]
    block_size: int
    medium: str
    parent_block_hash: BlockHash | None = None
    token_ids: list[int] = []
    lora_id: int | None = None
    lora_name: str | None = None


class BlockRemoved(Event):
    """The storage does not hold these blocks any more."""

    block_hashes: list[BlockHash]
    medium: str


class AllBlocksCleared(Event):
    """The storage does not hold any of this stream's blocks any more."""


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """The events from one call of the page store."""

    ts: float
    """When the call ended, in seconds since the epoch."""
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def block_hash(page_hash: str, form: HashFormat) -> BlockHash:
    """Convert a page hash to the form that events use.

    `int64` is SGLang's form (`hash_str_to_int64`). `uint64` is vLLM's (`maybe_convert_block_hash`), and
    `bytes` is vLLM's with `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`.
    """
    digest = bytes.fromhex(page_hash)
    if form == "bytes":
        return digest
    if form == "uint64":
        return int.from_bytes(digest[-8:], "big")
    return int.from_bytes(digest[:8], "big", signed=True)
