"""A replay over `s3` while the network and the server fail: hits are lost, and no byte is wrong."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from hicache_conformance import FaultProxy
from replays import replay_command, trace_flags
from s3_kit import config_of
from servers import Rclone

_REQUESTS = 160
_BETWEEN_FAULTS_NBYTES = 1 << 17
_RESTARTS_AFTER = (2, 5)
_SILENCE_S = 0.9


def _command(proxy: FaultProxy, report: Path) -> list[str]:
    config = {
        **config_of(Rclone(report.parent)),
        "endpoint_url": f"http://127.0.0.1:{proxy.address[1]}",
        "timeout_s": 3.0,
        "stall_timeout_s": 0.6,
    }
    return replay_command(
        "s3",
        config,
        *trace_flags((), ()),
        *("--requests", str(_REQUESTS), "--page-size", "512"),
        *("--scale-bytes", "1/1024", "--host-size", "4MiB", "--json", str(report)),
    )


class _FaultSchedule:
    """A series of faults. Each comes when some bytes have passed since the one before."""

    def __init__(self, proxy: FaultProxy, server: Rclone) -> None:
        self.proxy = proxy
        self.server = server
        self.faults = 0
        self._next_nbytes = _BETWEEN_FAULTS_NBYTES
        kinds: list[Callable[[], object]] = [
            partial(proxy.reset_after, 20_000, direction="up"),
            partial(proxy.truncate_after, 300),
            partial(proxy.reset_after, 5_000, direction="down"),
            self._silence,
            proxy.refuse,
        ]
        self._kinds = cycle(kinds)

    def advance(self) -> None:
        """Inject the next fault if enough bytes have passed."""
        if self.proxy.bytes_up < self._next_nbytes:
            return
        if self.faults in _RESTARTS_AFTER:
            self.server.stop()
            self.server.start()
        next(self._kinds)()
        time.sleep(_SILENCE_S / 3)  # a fault that hits no request lasts as long
        self.proxy.pass_through()
        self.faults += 1
        self._next_nbytes = self.proxy.bytes_up + _BETWEEN_FAULTS_NBYTES

    def _silence(self) -> None:
        self.proxy.go_silent()
        time.sleep(_SILENCE_S)


@pytest.mark.slow
def test_faults_and_restarts_cost_hits_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    with Rclone(tmp_path / "server") as server, FaultProxy(("127.0.0.1", server.port)) as proxy:
        schedule = _FaultSchedule(proxy, server)
        with subprocess.Popen(_command(proxy, file), stdout=subprocess.DEVNULL) as replay:
            while replay.poll() is None:
                schedule.advance()
                time.sleep(0.01)
    report: dict[str, Any] = json.loads(file.read_text())

    assert (0, _REQUESTS, 0) == (replay.returncode, report["requests"], report["corrupt_pages"])
    assert report["verified_nbytes"] > 0
    assert report["store"]["load_ok"] > 0
    assert schedule.faults > max(_RESTARTS_AFTER)
    for counter in ("resets", "truncated", "stalls", "retries"):
        assert report["storage"].get(counter, 0) > 0, report["storage"]
