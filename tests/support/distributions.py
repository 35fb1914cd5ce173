"""Runs commands outside the source tree, and makes environments to install distributions in."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from servers import ROOT

VERSION: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
DIST = ROOT / "dist"
CONSTRAINTS = ROOT / "constraints.txt"
WHEELS_PYTHON = ROOT / ".venv-wheels" / "bin" / "python"


def run(directory: Path, *command: Path | str, **variables: str) -> str:
    """Run a command outside the source tree. Return what it printed."""
    done = ended(directory, *command, **variables)
    assert 0 == done.returncode, done.stdout
    return done.stdout


def ended(
    directory: Path, *command: Path | str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command outside the source tree. Return its exit code, and what it printed."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        command,
        cwd=directory,
        env={**plain, "COLUMNS": "200", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def made_environment(folder: Path) -> Path:
    """Make an environment. Return the directory of its programs."""
    run(folder.parent, sys.executable, "-m", "venv", folder)
    return folder / "bin"
