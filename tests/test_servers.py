"""The servers of other tests start, fail and come back as those tests expect."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest
from scratch_servers import ScratchServers
from servers import (
    Ministack,
    Rclone,
    RedisCluster,
    RedisServer,
    ServerProcess,
    TlsRedisServer,
    ValkeyServer,
    program,
)

KINDS = [RedisServer, ValkeyServer, TlsRedisServer, Ministack, Rclone]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_server_refuses_connections_and_comes_back_on_its_port(
    kind: type[ServerProcess], tmp_path: Path
) -> None:
    with kind(tmp_path) as server:
        server.stop()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port), timeout=5)
        server.start()

        assert server.answers()


def test_a_paused_server_does_not_answer_until_it_is_resumed(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server, server.connected() as connection:
        connection.settimeout(0.2)
        server.pause()
        connection.sendall(b"PING\r\n")
        with pytest.raises(TimeoutError):
            connection.recv(64)
        server.resume()
        connection.settimeout(10)

        assert connection.recv(64) == b"+PONG\r\n"


def test_no_process_is_left(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        pid = server.pid

    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_leaves_nothing_among_the_temporary_files(
    kind: type[ServerProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with kind(tmp_path / "server"):
        pass

    assert [] == list(temporary.iterdir())


def test_servers_listen_on_loopback_only(tmp_path: Path) -> None:
    for kind in KINDS:
        with kind(tmp_path / kind.__name__) as server:
            assert listeners(server.pid) <= {"0100007F"}


def test_a_cluster_shares_its_slots(tmp_path: Path) -> None:
    with RedisCluster(tmp_path) as cluster, cluster.nodes[1].connected() as connection:
        connection.sendall(b"CLUSTER SLOTS\r\n")

        assert connection.recv(1 << 16).startswith(b"*3\r\n")


def test_a_server_that_does_not_start_gives_the_reason(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no-such-option"):
        RedisServer(tmp_path, "--no-such-option", "1").start()


def test_a_missing_server_fails_a_test_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")

    with pytest.raises(pytest.fail.Exception, match="no nonesuch here"):
        program("nonesuch")


def test_a_missing_server_skips_a_test_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)

    with pytest.raises(pytest.skip.Exception, match="no nonesuch here"):
        program("nonesuch")


def listeners(pid: int) -> set[str]:
    """Return the addresses, as the kernel writes them, on which a process listens."""
    inodes: set[str] = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(fd.readlink()))
    listening = "0A"
    tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return {
        row[1].partition(":")[0]
        for row in rows
        if row[3] == listening and f"socket:[{row[9]}]" in inodes
    }


def test_a_check_that_outlives_its_test_starts_no_server(tmp_path: Path) -> None:
    with ScratchServers(RedisServer, tmp_path) as servers:
        assert servers.of("a") is servers.of("a")
        running = servers.of("a").pid

    with pytest.raises(RuntimeError, match="the test has ended"):
        servers.of("b")
    assert not Path(f"/proc/{running}").exists()
