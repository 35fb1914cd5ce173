"""The code blocks of the project's pages, and an interpreter to run them in."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def code_blocks(text: str, language: str = "python") -> list[str]:
    """Return the code blocks of a Markdown page."""
    found: list[str] = re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return found


def python_output(*arguments: str, cwd: Path) -> str:
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
