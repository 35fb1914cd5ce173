from __future__ import annotations

import msgspec
import pytest

from hicache_storage.events.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    block_hash,
)

HIGH = "ff" * 8 + "00" * 16 + "80" + "00" * 6 + "01"


@pytest.mark.parametrize(
    ("form", "expected"),
    [("int64", -1), ("uint64", (1 << 63) + 1), ("bytes", bytes.fromhex(HIGH))],
)
def test_a_hash_has_the_form_of_its_engine(form: str, expected: int | bytes) -> None:
    assert expected == block_hash(HIGH, form)  # type: ignore[arg-type]  # the forms are parameters


def test_a_batch_is_an_array_of_maps_with_every_required_field() -> None:
    batch = EventBatch(
        1.5, [BlockStored([7], 16, "STORAGE"), BlockRemoved([8], "STORAGE"), AllBlocksCleared()], 2
    )

    assert [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [7],
                "block_size": 16,
                "medium": "STORAGE",
                "parent_block_hash": None,
                "token_ids": [],
                "lora_id": None,
                "lora_name": None,
            },
            {"type": "BlockRemoved", "block_hashes": [8], "medium": "STORAGE"},
            {"type": "AllBlocksCleared"},
        ],
        2,
    ] == msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
