"""A test that failed on a busy machine runs again, and no other does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = f"""
import os, signal, subprocess, sys
import pytest
sys.path.insert(0, {str(Path(__file__).parent / "support")!r})
from repeats import Repeats

def pytest_configure(config):
    config.pluginmanager.register(Repeats(), "repeats")

@pytest.fixture
def pause(request):
    def pause():
        ticker = request.config.pluginmanager.get_plugin("repeats")._pauses.process.pid
        wake = f"import os, time; time.sleep(0.6); os.kill({{ticker}}, 18); os.kill({{os.getpid()}}, 18)"
        with subprocess.Popen([sys.executable, "-c", wake]):
            os.kill(ticker, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
    return pause
"""
TEST = """
from pathlib import Path

tried = Path(__file__).with_name("tried")

class TestIt:
    value = None

    def test_it(self, pause):
        assert self.value is None
        self.value = 1
        again = tried.exists()
        tried.touch()
        {body}
"""
RAN_AGAIN = "1 failed on a busy machine and ran again"


@pytest.mark.parametrize(
    ("body", "passes", "ran_again"),
    [
        ("assert again", False, False),
        ("pause(); assert again", True, True),
        ("pause(); assert not 'this'", False, True),
        ("pause()", True, False),
    ],
    ids=["not busy", "fails once", "fails twice", "does not fail"],
)
def test_a_failed_test_runs_again_if_the_machine_paused(
    tmp_path: Path, body: str, *, passes: bool, ran_again: bool
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TEST.format(body=body))
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ("1 passed" in process.stdout, process.returncode) == (passes, 1 - passes), (
        process.stdout
    )
    assert (RAN_AGAIN in process.stdout) == ran_again, process.stdout
