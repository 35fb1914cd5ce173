"""The kind of file system that holds a directory."""

from __future__ import annotations

import ctypes
import os
import sys

# From linux/magic.h. A rename and a write on one of these look the same to every process.
_LOCAL = frozenset(
    {
        0xEF53,  # ext2, ext3, ext4
        0x58465342,  # xfs
        0x9123683E,  # btrfs
        0xF2F52010,  # f2fs
        0x2FC12FC1,  # zfs
        0x01021994,  # tmpfs
        0x858458F6,  # ramfs
        0x794C7630,  # overlayfs
    }
)
_STATFS_NBYTES = 512


def is_local(path: str) -> bool:
    """Return True if `path` is known to be on this machine only. Return False if it is unknown."""
    if not sys.platform.startswith("linux"):
        return False
    status = ctypes.create_string_buffer(_STATFS_NBYTES)
    statfs = ctypes.CDLL(None, use_errno=True).statfs
    if statfs(ctypes.c_char_p(os.fsencode(path)), status):
        return False
    kind = ctypes.c_long.from_buffer(status).value  # f_type is the first field, a long
    return kind & 0xFFFFFFFF in _LOCAL
