"""The guide for backend authors: its code runs, fails and passes as the guide says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from servers import RedisServer

GUIDE = Path(__file__).parents[2] / "docs" / "backend-author-guide.md"


def write(folder: Path, *names: str) -> None:
    """Write files of the guide."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    for name in names:
        (listing,) = (block for block in blocks if block.startswith(f"# {name}\n"))
        (folder / name).write_text(listing, encoding="utf-8")


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
    write(tmp_path, "acme_net.py", "test_acme_net.py")
    (tmp_path / "server").mkdir()

    with RedisServer(tmp_path / "server") as server:
        environment = {**os.environ, "ACME_PORT": str(server.port)}
        done = run_pytest(tmp_path, "test_acme_net.py", "--hicache-quick", environment=environment)

    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert "AcmeStorage: incomplete" in done.stdout


def test_a_key_without_its_space_fails_as_the_guide_says(tmp_path: Path) -> None:
    write(tmp_path, "acme_storage.py", "test_acme.py")
    (command,) = re.findall(r"^    (sed .*)$", GUIDE.read_text("utf-8"), re.MULTILINE)
    subprocess.run(shlex.split(command), cwd=tmp_path, check=True)

    done = run_pytest(tmp_path, "test_acme.py", "--hicache-quick", "-k", "kv_101")

    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    shown = re.findall(r"^    (KV-101 .*|Users of .*)$", GUIDE.read_text("utf-8"), re.MULTILINE)
    assert len(shown) == 2
    assert all(line in done.stdout for line in shown)


@pytest.mark.slow  # as above
@pytest.mark.timeout(300)
def test_the_guides_store_keeps_the_rules(tmp_path: Path) -> None:
    write(tmp_path, "acme_storage.py", "test_acme.py")

    done = run_pytest(tmp_path, "test_acme.py", "--hicache-quick", "--hicache-report", "out")

    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert "AcmeStorage: incomplete" in done.stdout
    assert {"result.json", "report.html", "junit.xml", "badge.json"} == {
        path.name for path in (tmp_path / "out" / "TestAcme").iterdir()
    }
