"""A green run of thousands of tests ends with a few lines; what is missing or failed is in them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from short_summary import lines

NO_SERVER = "no redis-server here: run tests/get_servers.sh, or install it"
CONFTEST = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent / "support")!r})
from short_summary import ShortSummary

def pytest_configure(config):
    config.pluginmanager.register(ShortSummary())
"""
TESTS = """
import pytest
from hicache_conformance import StorageConformance
from hicache_backends.memory import MemoryStorage

class Lying(MemoryStorage):
    def batch_delete(self, space, hashes):
        self.ensure_open()
        return [True] * len(hashes)

class TestAcme(StorageConformance):
    storage_class = {storage}
    def config(self, scratch):
        return {{}}

@pytest.mark.parametrize("number", range(500))
def test_skipped(number):
    pytest.skip(f"reason {{number % 50}}")
"""


def _run(folder: Path, storage: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_acme.py").write_text(TESTS.format(storage=storage))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--hicache-quick"]
    chosen = ["-k", "test_skipped or kv_007"]
    return subprocess.run(
        [*command, *chosen], cwd=folder, capture_output=True, text=True, check=False
    )


def test_a_green_run_ends_with_a_few_lines(tmp_path: Path) -> None:
    done = _run(tmp_path, "MemoryStorage")

    assert done.returncode == 0, done.stdout
    _, _, end = done.stdout.partition("[100%]\n")
    assert len(end.splitlines()) <= 15, end
    assert "kit         1: verdicts without a broken rule" in end
    assert "more reasons; -rs shows each" in end
    assert " skipped" in end.splitlines()[-1]


def test_a_broken_rule_is_shown_whole(tmp_path: Path) -> None:
    done = _run(tmp_path, "Lying")

    assert done.returncode == 1, done.stdout
    assert "Lying: failed" in done.stdout
    assert "FAILED test_acme.py::TestAcme::test_kv_007" in done.stdout
    assert "\nkit" not in done.stdout


@pytest.mark.parametrize("others", [0, 100])
def test_a_missing_server_is_always_shown(others: int) -> None:
    many = [f"reason {number}" for number in range(others)] * 2

    assert f"skipped     1: {NO_SERVER}" in lines([*many, NO_SERVER])


def test_every_skipped_test_is_counted() -> None:
    reasons = [f"reason {number % 50}" for number in range(500)]

    assert sum(int(line[8:13]) for line in lines(reasons)) == 500


def test_nothing_skipped_is_no_line() -> None:
    assert lines([]) == []
