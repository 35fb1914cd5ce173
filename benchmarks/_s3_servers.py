"""The servers of `s3.py`, each a process on loopback, and a plain client for cleaning up."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from _ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from _certificates import Certificate

BUCKET = "pages"
_READY_LIMIT_S = 30.0


@contextmanager
def null_server() -> Generator[int, None, None]:
    """Run a server that only moves bytes; yield its port."""
    with _null_server() as (port,):
        yield port


@contextmanager
def null_server_with_tls(certificate: Certificate) -> Generator[tuple[int, int], None, None]:
    """Run a server that only moves bytes; yield its port, and that of TLS."""
    with _null_server(str(certificate.certificate), str(certificate.key)) as (plain, tls):
        yield plain, tls


@contextmanager
def _null_server(*arguments: str) -> Generator[list[int], None, None]:
    program = Path(__file__).with_name("_null_server.py")
    with subprocess.Popen(
        [sys.executable, str(program), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield [int(port) for port in process.stdout.readline().split()]
        process.stdin.close()


@contextmanager
def ministack() -> Generator[int, None, None]:
    """Run a server with S3's semantics that keeps objects in memory; yield its port."""
    (port,) = free_ports(1)
    environment = {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "LOG_LEVEL": "ERROR"}
    environment |= {"IOT_MTLS_ENABLED": "0", "SFTP_ENABLED": "0"}
    with subprocess.Popen(
        [sys.executable, "-m", "ministack"],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            _await(port)
            request(port, "PUT", f"/{BUCKET}")
            yield port
        finally:
            process.kill()


def request(port: int, method: str, path: str) -> None:
    """Send a request without a signature, which both servers accept."""
    remove(port, [path], method)


def remove(port: int, paths: Iterable[str], method: str = "DELETE") -> None:
    """Delete objects."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_READY_LIMIT_S)
    for path in paths:
        connection.request(method, path)
        connection.getresponse().read()
    connection.close()


def _await(port: int) -> None:
    deadline_s = time.monotonic() + _READY_LIMIT_S
    while True:
        try:
            request(port, "GET", "/")
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)
        else:
            return
