"""What is known of each filesystem: how a page becomes visible, who sees it, what it survives.

The claims are those of the fsspec implementation, not of the product behind it: what matters is the call
that it really makes. A filesystem that is not listed gets the most careful treatment and claims nothing.
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
    """How a page comes under its name."""

    PUT = "put"
    """One write, that shows whole or not at all and replaces what was there."""
    RENAME = "rename"
    """Under another name, then a rename that replaces what was there, atomically."""
    DIRECT = "none"
    """In place, where it may be seen half: nothing that is there is ever overwritten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """What a filesystem can be trusted with."""

    names: tuple[str, ...]
    publishing: Publishing
    durability: Durability = Durability.CRASH
    shared: bool = True
    has_directories: bool = True
    """A file needs its directory to be made first."""
    lists_by_prefix: bool = False
    """`find` takes the beginning of a name, and asks the store for nothing else."""
    parallelism: int = 1
    """Not every client stands several threads."""
    rename: Callable[[str, str], None] | None = None
    """A better one than the filesystem's own `mv`."""
    options: Callable[[int], Mapping[str, Any]] = field(default=lambda _: {})
    """Storage options that suit so many calls at once; the user's come first."""


def _s3_options(parallelism: int) -> Mapping[str, Any]:
    """As many connections as calls, one request a page, no second layer of retries.

    Puts keep botocore's checksum: some servers take half a body for all of it without.
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
        rename=os.replace,  # its own copies where it cannot rename, and moves into directories
    ),
    Protocol(
        names=("s3", "s3a"),
        publishing=Publishing.PUT,
        has_directories=False,
        lists_by_prefix=True,
        parallelism=2 * _NETWORK_PARALLELISM,  # botocore asks for leave before each put
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
        names=("hdfs", "webhdfs", "smb", "ftp", "webdav"),  # none of them replaces in a rename
        publishing=Publishing.DIRECT,
    ),
)

_BY_NAME = {name: protocol for protocol in _PROTOCOLS for name in protocol.names}


def protocol_of(name: str) -> Protocol:
    """What is known of the filesystem `name`; nothing is promised of one that is not listed."""
    return _BY_NAME.get(name) or Protocol(
        names=(name,),
        publishing=Publishing.DIRECT,
        durability=Durability.PROCESS,
        shared=False,
    )
