"""The guide for backend authors: its code runs, fails and passes as the guide says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from servers import RedisServer

GUIDE = Path(__file__).parents[2] / "docs" / "backend-author-guide.md"


def listings(name: str) -> list[str]:
    """Return the versions of a file in the guide, in order."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    return [block for block in blocks if block.startswith(f"# {name}\n")]


def run_pytest(
    folder: Path, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the author's pytest in the author's folder."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow  # all of the kit's quick checks, in one test
@pytest.mark.timeout(300)
def test_the_store_behind_a_server_keeps_the_rules(tmp_path: Path) -> None:
    for name in ("acme_net.py", "test_acme_net.py"):
        (tmp_path / name).write_text(listings(name)[0], encoding="utf-8")
    (tmp_path / "server").mkdir()

    with RedisServer(tmp_path / "server") as server:
        environment = {**os.environ, "ACME_PORT": str(server.port)}
        done = run_pytest(tmp_path, "test_acme_net.py", "--hicache-quick", environment=environment)

    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert "AcmeStorage: incomplete" in done.stdout


def write(folder: Path, *, version: int) -> None:
    for name in ("acme_storage.py", "test_acme.py"):
        (folder / name).write_text(listings(name)[version], encoding="utf-8")


def test_the_first_version_fails_as_the_guide_says(tmp_path: Path) -> None:
    write(tmp_path, version=0)

    done = run_pytest(tmp_path, "test_acme.py", "--hicache-quick", "-k", "kv_101")

    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    shown = re.findall(r"^    (KV-101 .*|Users of .*)$", GUIDE.read_text("utf-8"), re.MULTILINE)
    assert len(shown) == 2
    assert all(line in done.stdout for line in shown)


@pytest.mark.slow  # as above
@pytest.mark.timeout(300)
def test_the_second_version_is_conformant(tmp_path: Path) -> None:
    write(tmp_path, version=1)

    done = run_pytest(tmp_path, "test_acme.py", "--hicache-quick", "--hicache-report", "out")

    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert "AcmeStorage: incomplete" in done.stdout
    assert {"result.json", "report.html", "junit.xml", "badge.json"} == {
        path.name for path in (tmp_path / "out" / "TestAcme").iterdir()
    }
