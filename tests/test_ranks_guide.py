"""The Python in docs/ranks.md runs unchanged, and its messages are those that the page quotes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hicache_storage.errors import ConfigError
from hicache_storage.topology import Extent, Grid, Topology

GUIDE = (Path(__file__).parents[1] / "docs" / "ranks.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)


def test_there_is_python_in_the_guide() -> None:
    assert len(BLOCKS) == 2


@pytest.mark.parametrize("block", BLOCKS)
def test_it_runs(block: str) -> None:
    exec(compile(block, "docs/ranks.md", "exec"), {})  # noqa: S102 - the project's own page


def test_the_quoted_refusal_is_the_actual_one() -> None:
    with pytest.raises(ConfigError) as caught:
        Topology(tp_size=8).tiles(Extent(layers=32, heads=8), 0, Grid(head_group=2))

    assert f"\n{caught.value}\n" in GUIDE
