"""The publisher of KV events, beside vLLM's own: its structures, its hashes, its protocol."""

from __future__ import annotations

import importlib
from typing import Any

import msgspec
import pytest
import vllm_cpu
from event_streams import Subscriber, past
from servers import free_port, wait_until

from hicache_storage.events.messages import AllBlocksCleared, BlockRemoved, BlockStored, block_hash
from hicache_storage.events.publisher import SENT, EventPublisher
from hicache_storage.events.settings import EventSettings

vllm_cpu.stand_in()

envs: Any = importlib.import_module("vllm.envs")
kv_events: Any = importlib.import_module("vllm.distributed.kv_events")
kv_cache_utils: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
decode = msgspec.msgpack.Decoder(kv_events.KVEventBatch).decode
DIGEST = bytes(range(200, 232))
EVENTS: list[Any] = [
    BlockStored([1, DIGEST], 256, "STORAGE"),
    BlockRemoved([1], "STORAGE"),
    AllBlocksCleared(),
]
OURS: list[Any] = [
    kv_events.BlockStored(
        block_hashes=[1, DIGEST],
        parent_block_hash=None,
        token_ids=[],
        block_size=256,
        lora_id=None,
        medium="STORAGE",
        lora_name=None,
    ),
    kv_events.BlockRemoved(block_hashes=[1], medium="STORAGE"),
    kv_events.AllBlocksCleared(),
]


def test_vllms_decoder_reads_every_event() -> None:
    settings = EventSettings(endpoint=f"tcp://127.0.0.1:{free_port()}", bind=True)
    publisher = EventPublisher(settings)
    try:
        with Subscriber(settings.endpoint, decode=decode) as subscriber:
            subscriber.wait_until_connected(publisher)
            publisher.publish(EVENTS)
            _, batch = subscriber.receive()
    finally:
        publisher.close()

    assert OURS == batch.events
    assert None is batch.data_parallel_rank


def test_past_batches_come_as_from_vllms_own_publisher() -> None:
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(4)]
    settings = EventSettings(endpoint=addresses[0], bind=True, replay_endpoint=addresses[1])
    publisher = EventPublisher(settings, data_parallel_rank=0)
    theirs = kv_events.ZmqEventPublisher(
        0, endpoint=f"{addresses[2].replace('127.0.0.1', '*')}", replay_endpoint=addresses[3]
    )
    try:
        publisher.publish(EVENTS)
        theirs.publish(kv_events.KVEventBatch(ts=1.0, events=OURS))
        wait_until(lambda: publisher.stats()[SENT] == 1)
        wait_until(lambda: len(past(addresses[3])) == 1)
        ((our_number, ours),) = past(addresses[1])
        ((their_number, of_vllm),) = past(addresses[3])
    finally:
        publisher.close()
        theirs.shutdown()

    assert (their_number, of_vllm[1:]) == (our_number, ours[1:])


@pytest.mark.parametrize(("form", "as_int"), [("uint64", True), ("bytes", False)])
def test_hashes_are_vllms(form: Any, monkeypatch: pytest.MonkeyPatch, *, as_int: bool) -> None:
    # vLLM keeps the values of environment variables from the first engine of this process on.
    values: dict[str, Any] = envs.__dict__
    monkeypatch.setitem(values, "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", as_int)

    expected = kv_cache_utils.maybe_convert_block_hash(kv_cache_utils.BlockHash(DIGEST))

    assert expected == block_hash(DIGEST.hex(), form)
