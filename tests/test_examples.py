"""Every example runs unchanged, and the Python on the pages is the same as in the examples."""

from __future__ import annotations

from pathlib import Path

import pytest
from documents import code_blocks, python_output

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = ["docs/device-pool.md", "docs/ranks.md", "docs/tracing.md"]
PYTHON_BLOCKS = [
    pytest.param(block, id=f"{page}-{number}")
    for page in PAGES
    for number, block in enumerate(code_blocks((ROOT / page).read_text()))
]


def test_there_are_examples() -> None:
    assert EXAMPLES
    assert len(PYTHON_BLOCKS) > len(PAGES)  # ranks.md has two


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    assert python_output(str(example), cwd=tmp_path)


@pytest.mark.parametrize("block", PYTHON_BLOCKS)
def test_the_python_of_a_page_runs(block: str, tmp_path: Path) -> None:
    python_output("-c", block, cwd=tmp_path)
