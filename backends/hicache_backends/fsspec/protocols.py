"""The table of known filesystems: publishing, durability, sharing and parallelism of each.

The claims hold for the fsspec implementation, not for the product behind it, because they depend on the
calls that the implementation makes. A filesystem that is not in the table has the most careful
publishing and claims nothing.
"""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hicache_storage.storage import Durability

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_NETWORK_PARALLELISM = 16
_LOCAL_PARALLELISM = 4


class Publishing(enum.Enum):
    """Way of giving a page its name."""

    PUT = "put"
    """One write, which appears as a whole or not at all, and replaces the old file."""
    RENAME = "rename"
    """A write under another name, then a rename that replaces the old file atomically."""
    DIRECT = "none"
    """A write in place, which may be seen half. An existing page is never overwritten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """Properties of a filesystem."""

    names: tuple[str, ...]
    publishing: Publishing
    durability: Durability = Durability.CRASH
    shared: bool = True
    has_directories: bool = True
    """True if a file needs its directory to be made first."""
    lists_by_prefix: bool = False
    """True if `find` takes the beginning of a name, and asks the store for nothing else."""
    parallelism: int = 1
    """Concurrent requests. Not every client supports several threads."""
    rename: Callable[[str, str], None] | None = None
    """A rename that replaces the filesystem's own `mv`."""
    options: Callable[[int], Mapping[str, Any]] = field(default=lambda _: {})
    """Storage options for a parallelism. The user's options come first."""


def _s3_options(parallelism: int) -> Mapping[str, Any]:
    """Return options for one connection a call, one request a page and no second layer of retries.

    Puts keep botocore's checksum: without it some servers accept half a body as all of it.
    """
    return {
        "config_kwargs": {
            "max_pool_connections": parallelism,
            "response_checksum_validation": "when_required",
            "retries": {"max_attempts": 0},
        },
        "max_concurrency": 1,
    }


_PROTOCOLS = (
    Protocol(
        names=("memory",),
        publishing=Publishing.PUT,
        durability=Durability.PROCESS,
        shared=False,
    ),
    Protocol(
        names=("file", "local"),
        publishing=Publishing.RENAME,
        parallelism=_LOCAL_PARALLELISM,
        rename=os.replace,  # `mv` copies where it cannot rename, and moves into directories
    ),
    Protocol(
        names=("s3", "s3a"),
        publishing=Publishing.PUT,
        has_directories=False,
        lists_by_prefix=True,
        parallelism=2 * _NETWORK_PARALLELISM,  # botocore waits for `100 Continue` before each put
        options=_s3_options,
    ),
    Protocol(
        names=("gs", "gcs", "az", "abfs", "abfss"),
        publishing=Publishing.PUT,
        has_directories=False,
        lists_by_prefix=True,
        parallelism=_NETWORK_PARALLELISM,
    ),
    Protocol(names=("sftp", "ssh"), publishing=Publishing.RENAME),
    Protocol(
        names=("hdfs", "webhdfs", "smb", "ftp", "webdav"),  # no rename of theirs replaces a file
        publishing=Publishing.DIRECT,
    ),
)

_BY_NAME = {name: protocol for protocol in _PROTOCOLS for name in protocol.names}


def protocol_of(name: str) -> Protocol:
    """Return the properties of the filesystem `name`. An unknown one promises nothing."""
    return _BY_NAME.get(name) or Protocol(
        names=(name,),
        publishing=Publishing.DIRECT,
        durability=Durability.PROCESS,
        shared=False,
    )
