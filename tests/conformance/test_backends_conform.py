"""The verdict on the project's own backends and examples, as an operator gets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
_POWER = {"path": "{scratch}", "durability": "power"}
_EVICTING = {"path": "{scratch}", "capacity_nbytes": "256MiB"}


def verdict(
    tmp_path: Path, name: str, config: dict[str, Any], *arguments: str
) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the record of `hicache-conformance`."""
    command = ["--hicache-storage-backend", name, "--report", str(tmp_path), *arguments]
    command += ["--hicache-storage-backend-extra-config", json.dumps(config)]
    done = subprocess.run(
        [sys.executable, "-m", "hicache_conformance", *command],
        env={**os.environ, "PYTHONPATH": str(ROOT / "examples")},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    return done.returncode, json.loads((tmp_path / "result.json").read_text())


def unpassed(record: dict[str, Any]) -> dict[str, str]:
    """Return the rules that failed or could not be decided, with the reason."""
    return {
        check["name"]: check["message"]
        for rule in record["rules"]
        for check in rule["checks"]
        if check["outcome"] in ("failed", "error", "unknown")
    }


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "config", "arguments"),
    [
        ("memory", {}, ["--quick", "--seed", "1"]),
        pytest.param("memory", {}, [], marks=pytest.mark.slow),
        ("file", {"path": "{scratch}"}, ["--quick"]),
        pytest.param("file", {"path": "{scratch}"}, [], marks=pytest.mark.long),
        pytest.param("file", _POWER, ["--quick", "--rules", "KV-4*"], marks=pytest.mark.slow),
        pytest.param("file", _POWER, ["--quick"], marks=pytest.mark.long),
        pytest.param("file", _EVICTING, ["--quick", "--rules", "KV-00*"], marks=pytest.mark.slow),
        pytest.param("file", _EVICTING, ["--quick"], marks=pytest.mark.long),
        pytest.param(
            "dynamic",
            {"backend_name": "d", "module_path": "dict_backend", "class_name": "DictStorage"},
            ["--quick"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        *("memory", "memory-whole", "file", "file-whole", "file-power", "file-power-all-rules"),
        *("file-evicting", "file-evicting-all-rules", "example"),
    ],
)
def test_it_is_conformant(
    tmp_path: Path, name: str, config: dict[str, Any], arguments: list[str]
) -> None:
    code, record = verdict(tmp_path, name, config, *arguments)

    assert unpassed(record) == {}
    is_whole = not {"--quick", "--rules"} & set(arguments)
    assert (0, "conformant" if is_whole else "incomplete") == (code, record["verdict"])


@pytest.mark.long  # the other tests have the seeds 0 and 1
@pytest.mark.parametrize("seed", [20, 300])
def test_the_verdict_does_not_depend_on_the_seed(tmp_path: Path, seed: int) -> None:
    code, record = verdict(tmp_path, "memory", {}, "--quick", "--seed", str(seed))

    assert unpassed(record) == {}
    assert (0, seed) == (code, record["run"]["seed"])
