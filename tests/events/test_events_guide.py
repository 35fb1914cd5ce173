"""The Python in docs/events.md runs, and its tables name exactly the existing settings and events."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from documents import code_blocks

from hicache_storage.events import messages
from hicache_storage.events.publisher import DROPPED, SENT
from hicache_storage.events.settings import EventSettings

GUIDE = (Path(__file__).parents[2] / "docs" / "events.md").read_text(encoding="utf-8")
(BLOCK,) = code_blocks(GUIDE)
FIELDS = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", GUIDE, re.MULTILINE)


def test_the_example_runs(tmp_path: Path) -> None:
    block = BLOCK.replace("/tmp/", f"{tmp_path}/")
    exec(compile(block, "docs/events.md", "exec"), {})  # noqa: S102 - the project's own page


def test_every_setting_is_in_the_table() -> None:
    assert set(EventSettings.model_fields) <= {name for name, _ in FIELDS}


@pytest.mark.parametrize("name", ["buffer_steps", "max_queue_size", "hwm", "remembered_pages"])
def test_a_default_is_the_actual_one(name: str) -> None:
    default: Any = EventSettings.model_fields[name].default

    assert f"{default:,}" == dict(FIELDS)[name]


def test_events_and_counters_have_their_names() -> None:
    names = [each.__name__ for each in messages.Event.__subclasses__()]

    assert all(f"`{name}`" in GUIDE for name in [*names, SENT, DROPPED])
