"""Compute the checksum of the C sources. A module that was compiled from different sources is not used.

The build of the module runs this file on its own, so it imports nothing from the package.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def checksum(folder: Path) -> str:
    """Return the CRC-32 of the C sources in `folder`. "" if there are none, as in a wheel."""
    sources = sorted(folder.rglob("*.[ch]"))
    value = 0
    for path in sources:
        value = zlib.crc32(path.read_bytes(), zlib.crc32(path.name.encode(), value))
    return f"{value:08x}" if sources else ""
