"""`make gpu` on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from servers import ROOT


def run_gpu(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tests/gpu.py", *options],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )


def test_without_cuda_it_fails_and_runs_no_test() -> None:
    done = run_gpu(CUDA_VISIBLE_DEVICES="")

    assert 1 == done.returncode
    assert done.stderr.startswith("make gpu: torch sees no CUDA")
    assert not done.stdout


def test_missing_packages_are_named_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "tests/gpu.py"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert 1 == done.returncode
    assert "lacks torch, numpy, pydantic, xxhash" in done.stderr
    assert 1 == done.stderr.count("\n")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dry_run_has_tests_and_ratios_of_a_cpu(tmp_path: Path) -> None:
    done = run_gpu("--device", "cpu", "--out", str(tmp_path))

    assert 0 == done.returncode, done.stdout
    summary = (tmp_path / "summary.txt").read_text("utf-8")
    for text in ("passed on cpu: ", "x copy, then compute", "L1 → L2", "result  passed"):
        assert text in summary
