"""Files and sockets that targets reuse for each input."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""A file system in memory. Others may write a file to disk when it is overwritten and closed."""


@cache
def directory(name: str) -> Path:
    """Return an empty directory of this process, which is removed at its end."""
    path = tempfile.mkdtemp(prefix=f"hicache-fuzz-{name}-", dir=os.environ.get("TMPDIR", MEMORY))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


def write(path: str, content: bytes | bytearray) -> None:
    """Replace the bytes of a file, more quickly than `Path.write_bytes`."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(fd, content)
    os.close(fd)


def read(path: str) -> bytes:
    """Return the bytes of a file that is not large."""
    fd = os.open(path, os.O_RDONLY)
    content = os.read(fd, 1 << 20)
    os.close(fd)
    return content


@contextmanager
def peer_of(data: bytes) -> Generator[socket.socket]:
    """Yield a connected socket whose peer has sent `data` and the end of its data.

    Nothing reads what the socket sends.
    """
    near, far = socket.socketpair()
    try:
        far.sendall(data)
        far.shutdown(socket.SHUT_WR)
        yield near
    finally:
        near.close()
        far.close()
