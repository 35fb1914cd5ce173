"""Every example runs unchanged, and the Python on the pages is the Python of the examples."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = ["docs/device-pool.md", "docs/ranks.md", "docs/tracing.md"]
PYTHON_BLOCKS = [
    pytest.param(block, id=f"{page}-{number}")
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    )
]


def run(*arguments: str, cwd: Path) -> str:
    """Return the output of a new interpreter in which warnings are errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_are_examples() -> None:
    assert EXAMPLES
    assert len(PYTHON_BLOCKS) > len(PAGES)  # ranks.md has two


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    assert run(str(example), cwd=tmp_path)


@pytest.mark.parametrize("block", PYTHON_BLOCKS)
def test_the_python_of_a_page_runs(block: str, tmp_path: Path) -> None:
    run("-c", block, cwd=tmp_path)
