"""The README is short, its Python prints what it says, and it counts the kit's rules right."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import hicache_conformance.rules
from servers import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = "\n".join(re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE))


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_its_python_prints_what_it_says(tmp_path: Path) -> None:
    """The second block goes on where the first one ended."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PYTHON],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == re.findall(r"print\(.*\)  # (.*)", PYTHON)


def test_it_counts_the_rules() -> None:
    assert f"{len(hicache_conformance.rules.RULES)} rules" in README
