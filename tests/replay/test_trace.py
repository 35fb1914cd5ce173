"""Traces: the Mooncake format, its errors, and synthetic traces."""

from __future__ import annotations

import gzip
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache_storage.errors import ConfigError
from hicache_storage.keys import page_hashes
from hicache_storage.replay.trace import (
    BLOCK_TOKENS,
    InfiniteCache,
    Request,
    block_tokens,
    read_trace,
    synthetic_trace,
)

_LINE = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 46]}


def _line(**changes: Any) -> str:
    return json.dumps({**_LINE, **changes}) + "\n"


def _request(*blocks: int) -> Request:
    return Request(0.0, BLOCK_TOKENS * len(blocks), 1, blocks)


class TestReading:
    def test_a_line_is_a_request(self, tmp_path: Path) -> None:
        (tmp_path / "t.jsonl").write_text(_line())

        assert read_trace(tmp_path / "t.jsonl") == [Request(1.5, 600, 7, (0, 46))]

    def test_gzip_is_detected_by_its_content(self, tmp_path: Path) -> None:
        (tmp_path / "t").write_bytes(gzip.compress(_line().encode() * 3))

        assert len(read_trace(tmp_path / "t")) == 3

    def test_empty_lines_are_skipped(self, tmp_path: Path) -> None:
        (tmp_path / "t").write_text("\n" + _line() + "  \n" + _line())

        assert len(read_trace(tmp_path / "t")) == 2

    def test_no_line_beyond_the_limit_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "t").write_text(_line() * 2 + "nonsense\n")

        assert len(read_trace(tmp_path / "t", limit=2)) == 2

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("nonsense\n", "is not JSON: expecting value"),
            ("[1]\n", "must be an object, not list"),
            ("[" * 100_000 + "\n", "is not JSON"),
            ("{}\n", "timestamp: this field is required"),
            ('{"timestamp": 1, "input_length": 1, "output_length": 1}\n', "hash_ids: this field"),
            (_line(timestamp="1"), "timestamp: must be milliseconds"),
            (_line(timestamp=-1), "timestamp: must be milliseconds"),
            (_line(timestamp=float("nan")), "timestamp: must be milliseconds"),
            (_line(timestamp=True), "timestamp: must be milliseconds"),
            (_line(timestamp=10**400), "timestamp: must be milliseconds"),
            (_line(timestamp=1e300), "timestamp: must be milliseconds"),
            (
                _line(timestamp=1499),
                "timestamp: 1499 ms is earlier than 1500 ms of the request before",
            ),
            (
                _line(input_length=5000),
                "hash_ids: there are 2, but an input_length of 5000 .* has 10",
            ),
            (_line(input_length=512), "hash_ids: there are 2, .* has 1"),
            (_line(hash_ids=[]), "hash_ids: there are 0, .* has 2"),
            (_line(input_length=1.5), "input_length: must be a whole number"),
            (_line(output_length=-3), "output_length: must be a whole number"),
            (_line(hash_ids=7), "hash_ids: must be a list, not int"),
            (_line(hash_ids=[1, "2"]), "hash_ids: must be whole numbers .* not '2'"),
            (_line(hash_ids=[1, None]), "hash_ids: must be whole numbers .* not None"),
            (_line(hash_ids=[-1]), "hash_ids: must be whole numbers .* not -1"),
            (_line(hash_ids=[2**60]), "hash_ids: must be whole numbers"),
            (_line(hash_ids=[True]), "hash_ids: must be whole numbers"),
        ],
    )
    def test_a_wrong_line_is_named_with_the_reason(
        self, tmp_path: Path, line: str, reason: str
    ) -> None:
        (tmp_path / "t").write_text(_line() + line)

        with pytest.raises(ConfigError, match=f"t: line 2: {reason}"):
            read_trace(tmp_path / "t")

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"", "holds no requests"),
            (b"\n \n", "holds no requests"),
            (b'"\xff"\n', "is not UTF-8 text"),
            (gzip.compress(_line().encode() * 99, mtime=0)[:-9], "ends too early"),
            (b"\x1f\x8bnonsense", "cannot be read"),
            (gzip.compress(b"", mtime=0)[:10] + b"\x07" * 60, "is damaged"),
        ],
    )
    def test_a_wrong_file_is_named_with_the_reason(
        self, tmp_path: Path, content: bytes, reason: str
    ) -> None:
        (tmp_path / "t").write_bytes(content)

        with pytest.raises(ConfigError, match=f"{tmp_path}/t: .*{reason}"):
            read_trace(tmp_path / "t")

    def test_a_line_without_an_end_is_refused(self, tmp_path: Path) -> None:
        """The line is not read into memory as a whole, because a gzip file of 100 KB can hold 100 MB."""
        path = tmp_path / "trace.jsonl.gz"
        with gzip.open(path, "wb", compresslevel=1) as file:
            for _ in range(17):
                file.write(b" " * (1 << 20))

        with pytest.raises(ConfigError, match="has a line of 16,777,216 characters or more"):
            read_trace(path)

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"no\.jsonl: cannot be read: No such file"):
            read_trace(tmp_path / "no.jsonl")

    def test_a_directory_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
            read_trace(tmp_path)

    def test_requests_that_arrive_at_once_are_in_order(self, tmp_path: Path) -> None:
        (tmp_path / "t").write_text(_line() * 3)

        assert [request.arrival_s for request in read_trace(tmp_path / "t")] == [1.5] * 3

    @pytest.mark.skipif("HICACHE_TRACE" not in os.environ, reason="HICACHE_TRACE names no trace")
    def test_the_published_trace_is_read(self) -> None:
        assert len(read_trace(Path(os.environ["HICACHE_TRACE"]))) == 12_031


class TestTokens:
    def test_each_block_has_512_of_its_own(self) -> None:
        expected = [*range(1536, 2048), *range(512)]

        assert expected == block_tokens((3, 0)).tolist()

    def test_narrow_ids_make_narrow_tokens(self) -> None:
        """Pages of 4-byte tokens are hashed fastest."""
        assert block_tokens((0, 2**23 - 1)).dtype == np.uint32

    def test_huge_ids_do_not_wrap(self) -> None:
        huge = 2**40

        assert block_tokens((huge,)).tolist() == list(range(huge * 512, huge * 512 + 512))

    def test_equal_prefixes_have_equal_page_hashes(self) -> None:
        one = page_hashes(block_tokens((5, 6, 7)), 64)
        other = page_hashes(block_tokens((5, 6, 8)), 64)

        assert one[:16] == other[:16]
        assert not set(one[16:]) & set(other[16:])

    def test_an_empty_prompt_has_none(self) -> None:
        assert block_tokens(()).size == 0


class TestInfiniteCache:
    def test_it_finds_the_leading_blocks_that_came_before(self) -> None:
        cache = InfiniteCache()

        hits = [cache.hits(_request(*blocks)) for blocks in [(1, 2), (1, 3, 2), (1, 3, 4)]]

        assert hits == [0, 1, 2]


class TestSynthetic:
    def test_a_seed_always_makes_the_same_trace(self) -> None:
        assert synthetic_trace(7, conversations=20) == synthetic_trace(7, conversations=20)

    def test_another_seed_makes_another(self) -> None:
        assert synthetic_trace(7, conversations=20) != synthetic_trace(8, conversations=20)

    def test_arrivals_are_in_order(self) -> None:
        arrivals = [request.arrival_s for request in synthetic_trace(0, conversations=50)]

        assert arrivals == sorted(arrivals)

    def test_conversations_overlap(self) -> None:
        """Otherwise an LRU cache with room for one conversation would find every block."""
        tails = [request.blocks[:8] for request in synthetic_trace(0, conversations=50)]
        changes = sum(one[:7] != other[:7] for one, other in pairwise(tails))

        assert changes > len(tails) / 2

    def test_prompts_have_the_blocks_that_their_length_needs(self) -> None:
        for request in synthetic_trace(0, conversations=50):
            assert len(request.blocks) == -(-request.input_tokens // BLOCK_TOKENS)

    def test_turns_repeat_the_blocks_of_earlier_turns(self) -> None:
        requests = synthetic_trace(0, conversations=100)
        cache = InfiniteCache()
        hits = sum(cache.hits(request) for request in requests)

        assert 0.5 < hits / sum(len(request.blocks) for request in requests) < 0.95

    def test_equal_blocks_have_equal_prefixes(self) -> None:
        prefixes: dict[int, tuple[int, ...]] = {}
        for request in synthetic_trace(3, conversations=100):
            for place, block in enumerate(request.blocks):
                assert prefixes.setdefault(block, request.blocks[:place]) == request.blocks[:place]

    def test_a_limit_cuts_conversations_short(self) -> None:
        unlimited = synthetic_trace(0, conversations=20)

        assert synthetic_trace(0, conversations=20, limit=9) == unlimited[:9]
