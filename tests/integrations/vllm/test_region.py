"""Two owners of one memory region are refused, in one process and in two."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hicache_storage.errors import ConfigError
from hicache_storage.integrations.vllm import _region

HOLD = """
import fcntl, os, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def spec_of(path: Path) -> Generator[Any]:
    """Yield an object with vLLM's names of a scheduler's region."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        yield SimpleNamespace(_scheduler_mmap=SimpleNamespace(fd=descriptor, mmap_path=str(path)))
    finally:
        os.close(descriptor)


def test_the_second_connector_of_a_region_is_refused_until_the_first_has_closed_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "region"
    with spec_of(path) as one:
        _region.claim_region(one)
        _region.claim_region(one)  # another tier of the same connector
        with spec_of(path) as two, pytest.raises(ConfigError, match=rf"share {path}.*engine_id"):
            _region.claim_region(two)
    with spec_of(path) as later:
        _region.claim_region(later)


def test_another_process_holds_a_region_until_it_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "region"
    path.touch()
    with (
        subprocess.Popen(
            [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process,
        spec_of(path) as spec,
    ):
        assert process.stdout is not None
        assert b"held\n" == process.stdout.readline()
        with pytest.raises(ConfigError, match="share"):
            _region.claim_region(spec)
        process.kill()
        process.wait()
        _region.claim_region(spec)


def test_a_region_that_this_vllm_does_not_show_is_told(caplog: pytest.LogCaptureFixture) -> None:
    _region.claim_region(SimpleNamespace())

    assert "engine_id" in caplog.text


def under_multi_connector(*children: dict[str, Any], offloading: set[str]) -> None:
    """Check the siblings of a child as in vLLM's MultiConnector: a caller has the config of all."""
    vllm_config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"connectors": list(children)})
    )
    assert vllm_config.kv_transfer_config
    _region.check_siblings(lambda child: child["kv_connector"] in offloading)


def test_several_offloading_connectors_of_one_engine_are_refused() -> None:
    ours, theirs, other = (
        {"kv_connector": name} for name in ("HiCacheConnector", "OffloadingConnector", "Nixl")
    )
    offloading = {"HiCacheConnector", "OffloadingConnector"}
    nested = {"kv_connector": "Multi", "kv_connector_extra_config": {"connectors": [theirs]}}

    under_multi_connector(other, ours, offloading=offloading)
    for children in ([ours, ours], [theirs, ours], [ours, other, nested]):
        with pytest.raises(ConfigError, match="two offloading connectors share"):
            under_multi_connector(*children, offloading=offloading)
    _region.check_siblings(bool)
