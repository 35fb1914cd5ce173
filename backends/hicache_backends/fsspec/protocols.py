"""The table of known filesystems: how each publishes pages, and its durability, sharing, parallelism.

The claims are about the fsspec implementation, not about the product behind it, because they depend
on the calls that the implementation makes. A filesystem that is not in the table gets the most
careful publishing and claims nothing.
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
    """How a page gets its name."""

    PUT = "put"
    """Write once. The file appears as a whole or not at all, and replaces the old file."""
    RENAME = "rename"
    """Write under another name, then rename. The rename replaces the old file atomically."""
    DIRECT = "none"
    """Write in place, so that a reader may see half of a page. An existing page is never overwritten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """The properties of a filesystem."""

    names: tuple[str, ...]
    publishing: Publishing
    durability: Durability = Durability.CRASH
    shared: bool = True
    has_directories: bool = True
    """True if a file's directory must be made first."""
    lists_by_prefix: bool = False
    """True if `find` accepts the beginning of a name and lists nothing else."""
    parallelism: int = 1
    """Concurrent requests. Some clients do not support several threads."""
    rename: Callable[[str, str], None] | None = None
    """A function that renames a file, used instead of the filesystem's own `mv`."""
    options: Callable[[int], Mapping[str, Any]] = field(default=lambda _: {})
    """A function from parallelism to storage options. The user's options take precedence."""


def _s3_options(parallelism: int) -> Mapping[str, Any]:
    """Return options for one connection per call, one request per page and no second layer of retries.

    Puts keep botocore's checksum, because without it some servers accept half a body as a whole
    one.
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
        has_directories=False,  # a directory goes with its last file
    ),
    Protocol(
        names=("file", "local"),
        publishing=Publishing.RENAME,
        parallelism=_LOCAL_PARALLELISM,
        rename=os.replace,  # `mv` copies if it cannot rename, and moves into directories
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
        names=("hdfs", "webhdfs", "smb", "ftp", "webdav"),  # their renames do not replace a file
        publishing=Publishing.DIRECT,
    ),
)

_BY_NAME = {name: protocol for protocol in _PROTOCOLS for name in protocol.names}


def protocol_of(name: str) -> Protocol:
    """Return the properties of the filesystem `name`. An unknown filesystem promises nothing."""
    return _BY_NAME.get(name) or Protocol(
        names=(name,),
        publishing=Publishing.DIRECT,
        durability=Durability.PROCESS,
        shared=False,
    )
