"""A short run of the benchmark of ranks: its checks and its table."""

from __future__ import annotations

from pathlib import Path

import pytest
import rank_scale
from _scale_places import file_place


def test_a_run_has_a_row(tmp_path: Path) -> None:
    with file_place(tmp_path) as place:
        run = rank_scale.replay("file", place.config, ranks=1, conversations=4)

    name, *_, corrupt = rank_scale.row("file", 1, [run])
    assert ("`file`, 1 rank", "0") == (name, corrupt)


def test_a_lost_block_ends_the_run(tmp_path: Path) -> None:
    with file_place(tmp_path) as place:
        full = {**place.config, "capacity_nbytes": "1MiB"}

        with pytest.raises(RuntimeError, match="was lost"):
            rank_scale.replay("file", full, ranks=1, conversations=20)
