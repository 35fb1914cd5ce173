from __future__ import annotations

import json
from dataclasses import replace

import pytest
from pages import hash_of, space

from hicache_storage.handoff.completion import Completion, completion_hash
from hicache_storage.keys import Shard, check_page_hashes

HASHES = [hash_of(number) for number in range(5)]
SPACE = space()


def completion(pages: int = 3) -> Completion:
    return Completion.of("request-1", SPACE, HASHES, pages, now_s=1e9)


def test_an_encoded_completion_is_decoded() -> None:
    assert completion() == Completion.decode(completion().encode(4096))


def test_it_fills_its_page() -> None:
    assert len(completion().encode(4096)) == 4096


def test_it_names_pool_shard_and_page_hash() -> None:
    shown = json.loads(completion().encode(4096).rstrip(b"\0"))

    assert shown["pool"] == "kv"
    assert shown["shard"] == {"layers": [0, 32], "heads": [0, 8], "context": None}
    assert shown["pages"] == 3
    assert shown["last_page_hash"] == HASHES[2]


def test_a_long_request_id_is_cut_short_and_still_fits() -> None:
    long = Completion.of("x" * 10_000, SPACE, HASHES, 3, now_s=0)

    assert len(long.encode(4096)) == 4096


def test_a_pool_name_that_does_not_fit_is_refused() -> None:
    wide = Completion.of("r", space(pool="p" * 5000), HASHES, 3, now_s=0)

    with pytest.raises(ValueError, match="shorter"):
        wide.encode(4096)


@pytest.mark.parametrize(
    "data",
    [b"", bytes(4096), b"{}", b"[1]", b"\xff\xfe", b"{" * 4096],
    ids=["nothing", "zeros", "empty", "list", "not-utf-8", "braces"],
)
def test_other_data_is_no_completion(data: bytes) -> None:
    assert Completion.decode(data) is None


def test_another_version_is_none() -> None:
    fields = json.loads(completion().encode(4096).rstrip(b"\0"))

    assert Completion.decode(json.dumps({**fields, "version": 2}).encode()) is None


def test_a_field_of_a_later_writer_is_no_harm() -> None:
    fields = json.loads(completion().encode(4096).rstrip(b"\0"))

    assert completion() == Completion.decode(json.dumps({**fields, "node": "n7"}).encode())


class TestMatches:
    @pytest.mark.parametrize("pages", [0, 1, 5])
    def test_its_own_prompt_and_shard(self, pages: int) -> None:
        assert completion(pages).matches(SPACE, HASHES)

    def test_not_another_shard(self) -> None:
        other = replace(SPACE, shard=Shard(layers=(0, 32), heads=(4, 8)))

        assert not completion().matches(other, HASHES)

    def test_not_another_prompt(self) -> None:
        assert not completion().matches(SPACE, [hash_of(77), *HASHES])

    def test_not_a_shorter_prompt(self) -> None:
        assert not completion().matches(SPACE, HASHES[:2])


class TestHash:
    def test_it_is_a_page_hash(self) -> None:
        check_page_hashes([completion_hash("any request / id", SPACE, HASHES)])

    def test_request_prompt_pool_and_shard_give_different_hashes(self) -> None:
        keys = {
            completion_hash("r", SPACE, HASHES),
            completion_hash("r2", SPACE, HASHES),
            completion_hash("r", SPACE, HASHES[:4]),
            completion_hash("r", space(pool="draft"), HASHES),
            completion_hash("r", replace(SPACE, shard=Shard(layers=(0, 32))), HASHES),
        }

        assert len(keys) == 5
