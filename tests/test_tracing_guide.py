"""The Python in docs/tracing.md runs unchanged, and its tables name the spans that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "tracing.md").read_text(encoding="utf-8")
(BLOCK,) = re.findall(r"^```python\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
(SPANS,) = re.findall(r"^## Spans$(.*?)^## ", GUIDE, re.DOTALL | re.MULTILINE)


def test_the_example_runs() -> None:
    exec(compile(BLOCK, "docs/tracing.md", "exec"), {})  # noqa: S102 - the project's own page


@pytest.mark.parametrize(
    "name",
    [
        "match",
        "present",
        "load",
        "save",
        "delete",
        "clear",
        "prefetch",
        "writeback",
        "load_job",
        "store_job",
        "transfer",
    ],
)
def test_a_span_is_in_the_table(name: str) -> None:
    assert any(f"`{name}`" in row.split("|")[1] for row in SPANS.splitlines() if row[:1] == "|")
