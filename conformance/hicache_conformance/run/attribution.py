"""Decides whether the store or the kit caused an exception that no check expected."""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from hicache_conformance.case.probe import ServerGone
from hicache_conformance.run.outcomes import Violation
from hicache_storage import storage

if TYPE_CHECKING:
    from hicache_storage.storage import HiCacheStorage

_KIT = Path(__file__).parents[1]
_STORES = _KIT / "selftest"
"""These stores are part of the kit, and the kit tests them."""


def blamed(error: BaseException, storage_class: type[HiCacheStorage] | None) -> Violation | None:
    """Return the violation if the store raised `error` in a call, or None if it did not."""
    if storage_class is None or isinstance(error, ServerGone) or not isinstance(error, Exception):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    place = max((at for at, frame in enumerate(frames) if _is_kit(frame.filename)), default=-1)
    if place + 1 >= len(frames) or frames[place + 1].filename not in _files_of(storage_class):
        return None
    called, origin = frames[place + 1], frames[-1]
    text = " ".join(str(error).split())
    return Violation(
        f"{called.name} raised {type(error).__name__}, but the contract allows no exception",
        "an answer; for a store that can't be used StorageUnavailable or StorageTimeout",
        f"{type(error).__name__}: {text} ({origin.filename}:{origin.lineno})"[:300],
    )


def _is_kit(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(_KIT) and not path.is_relative_to(_STORES)


def _files_of(storage_class: type) -> set[str]:
    found = {storage.__file__}
    for one in storage_class.__mro__:
        try:
            found.add(inspect.getfile(one))
        except (TypeError, OSError):
            continue  # the class is built in
    return found
