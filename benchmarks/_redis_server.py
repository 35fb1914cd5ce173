"""A Redis server of the benchmark, and the peer of a plain socket."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import shutil
import socket
import struct
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from _ports import free_ports, wait_for

if TYPE_CHECKING:
    from collections.abc import Generator

    from _certificates import Certificate

_FETCHED = Path(__file__).parents[1] / ".servers"
ORDER = struct.Struct("!QQ")
"""The message to the sink: number of bytes to receive, number of bytes to send."""


@contextmanager
def redis_server(
    name: str = "redis-server", *, certificate: Certificate | None = None
) -> Generator[int, None, None]:
    """Run a server without persistence; yield its loopback port, of TLS with a `certificate`.

    Raises:
        FileNotFoundError: The program is not installed.
    """
    path = os.pathsep.join([str(_FETCHED / "usr/bin"), os.environ.get("PATH", "")])
    program = shutil.which(name, path=path)
    if program is None:
        raise FileNotFoundError(f"no {name} here: run tests/get_servers.sh, or install it")
    libraries = os.pathsep.join(map(str, _FETCHED.glob("usr/lib/*-linux-gnu")))
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as directory:
        command = [program, "--bind", "127.0.0.1", "--dir", directory]
        command += ["--port", "0" if certificate else str(port)]
        if certificate:
            command += ["--tls-port", str(port), "--tls-auth-clients", "no"]
            command += ["--tls-cert-file", str(certificate.certificate)]
            command += ["--tls-key-file", str(certificate.key)]
        command += ["--save", "", "--appendonly", "no"]
        with subprocess.Popen(
            command, env={**os.environ, "LD_LIBRARY_PATH": libraries}, stdout=subprocess.DEVNULL
        ) as server:
            try:
                wait_for(port)
                yield port
            finally:
                server.terminate()


@contextmanager
def sink() -> Generator[int, None, None]:
    """Run a process that receives and sends as many bytes as requested; yield its port."""
    context = multiprocessing.get_context("fork")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = context.Process(target=_serve, args=(listener,), daemon=True)
        process.start()
        try:
            yield listener.getsockname()[1]
        finally:
            process.terminate()
            process.join()


def _serve(listener: socket.socket) -> None:
    buffer = memoryview(mmap.mmap(-1, 1 << 22))
    buffer[:] = bytes(len(buffer))
    while True:
        connection, _ = listener.accept()
        with connection:
            while len(order := connection.recv(ORDER.size, socket.MSG_WAITALL)) == ORDER.size:
                takes, gives = ORDER.unpack(order)
                while takes:
                    takes -= connection.recv_into(buffer[: min(takes, len(buffer))])
                while gives:
                    gives -= connection.send(buffer[: min(gives, len(buffer))])
                connection.sendall(b".")
