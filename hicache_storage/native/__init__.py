"""The data plane: whole batches in one call, without the interpreter lock.

Each function takes a batch and returns one verdict a page. The compiled module releases the interpreter
lock once for the whole call. `reference` has the same functions in Python, with the same verdicts. The
reference serves where the compiled module is missing, or where the environment has `HICACHE_NATIVE=0`.
`HICACHE_NATIVE=1` insists on the compiled module.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from hicache_storage.native.reference import (
    HIT,
    KEPT,
    LATE,
    MISS,
    NO_BULK,
    UNSYNCED,
    WRONG,
    check_files,
    digests,
    exists_files,
    read_files,
    receive_bulks,
    receive_pieces,
    send_pieces,
    write_files,
)
from hicache_storage.native.reference_exchanges import (
    FILLED,
    HEAD_NBYTES,
    LANE,
    RECEIVED,
    SENT,
    STALE,
    STATE_COUNT,
    STOPPED,
    VERDICT,
    run_exchanges,
)

__all__ = [
    "FILLED",
    "HEAD_NBYTES",
    "HIT",
    "KEPT",
    "LANE",
    "LATE",
    "MISS",
    "NO_BULK",
    "RECEIVED",
    "SENT",
    "STALE",
    "STATE_COUNT",
    "STOPPED",
    "UNSYNCED",
    "VERDICT",
    "WRONG",
    "check_files",
    "digests",
    "exists_files",
    "implementation",
    "read_files",
    "receive_bulks",
    "receive_pieces",
    "run_exchanges",
    "send_pieces",
    "write_files",
]

_FUNCTIONS = (
    "check_files",
    "digests",
    "exists_files",
    "read_files",
    "receive_bulks",
    "receive_pieces",
    "run_exchanges",
    "send_pieces",
    "write_files",
)


def _compiled() -> Any:
    """Return the compiled module, or None where the reference is to be used."""
    wanted = os.environ.get("HICACHE_NATIVE", "")
    if wanted not in ("", "0", "1"):
        raise ImportError(
            f"HICACHE_NATIVE is {wanted!r}: set it to 0 (Python) or 1 (compiled), or unset it"
        )
    if wanted == "0":
        return None
    try:
        return import_module("hicache_storage.native._native")
    except ImportError as error:
        if not wanted:
            return None
        raise ImportError(
            f"HICACHE_NATIVE is 1, and there is no compiled data plane ({error}): install a C compiler"
            " and the headers of Python, then this package again"
        ) from error


_module = _compiled()
implementation = "reference" if _module is None else "compiled"
if _module is not None:
    globals().update({name: getattr(_module, name) for name in _FUNCTIONS})
