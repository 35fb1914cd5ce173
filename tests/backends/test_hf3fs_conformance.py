"""The kit's verdict on `hf3fs`, by its quick checks and with every back door open."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STORES = Path(__file__).with_name("hf3fs_stores.py")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_it_is_conformant(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", str(STORES)]
    done = subprocess.run(
        [*command, "--hicache-quick", "--hicache-report", str(tmp_path), "-p", "no:cacheprovider"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    records = [json.loads(path.read_text()) for path in tmp_path.glob("**/result.json")]

    assert 0 == done.returncode, done.stdout[-4000:]
    assert {"conformant"} == {record["verdict"] for record in records}
