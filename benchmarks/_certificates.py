"""A certificate for the loopback address, which is its own authority."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path


class Certificate(NamedTuple):
    """The PEM files of a server."""

    certificate: Path
    key: Path


def new_certificate(directory: Path) -> Certificate:
    """Make a certificate that is valid for a day, by the program `openssl`."""
    made = Certificate(directory / "server.crt", directory / "server.key")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=127.0.0.1"
    subprocess.run(
        [
            *command.split(),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", made.key, "-out", made.certificate),
        ],
        check=True,
        capture_output=True,
    )
    return made
