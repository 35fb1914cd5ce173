"""Removes the pages that a check stored in a store that outlives it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.errors import UnsupportedOperation

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage

_BATCH = 1024


def remove_pages(
    storage: HiCacheStorage, stored: Mapping[KeySpace, Iterable[str]], token: str
) -> str:
    """Remove the pages in `stored`, and every page of the key spaces that carry `token`.

    The check has no list of the pages of a child process, or of a call that failed half-way. So if
    a store lists its key spaces, they are searched for these pages. Another run may use a key space
    without the token, so only the check's own pages are removed from it.

    Returns:
        A text about the pages that could not be removed, or "" if none is left.
    """
    spaces = {space: sorted(hashes) for space, hashes in stored.items()}
    problems: list[str] = []
    try:
        for space in storage.spaces():
            if _carries(space, token):
                spaces.setdefault(space, [])
    except UnsupportedOperation:
        pass
    except Exception as error:  # noqa: BLE001 - a cleanup reports every error
        problems.append(_text(error))
    for space, hashes in spaces.items():
        try:
            _empty(storage, space, hashes, is_own=_carries(space, token))
        except Exception as error:  # noqa: BLE001 - as above
            problems.append(_text(error))
    if not problems:
        return ""
    return f"pages of {len(problems)} of {len(spaces)} key spaces of {token}: {problems[0]}"


def _carries(space: KeySpace, token: str) -> bool:
    return token in f"{space.model} {space.tenant} {space.revision}"


def _empty(storage: HiCacheStorage, space: KeySpace, hashes: list[str], *, is_own: bool) -> None:
    storage.open_space(space)
    if is_own and storage.capabilities.enumerable:
        storage.clear(space)
        return
    limit = min(_BATCH, storage.capabilities.max_batch or _BATCH)
    for start in range(0, len(hashes), limit):
        part = hashes[start : start + limit]
        answers = storage.batch_delete(space, part)
        if answers != [True] * len(part):
            raise RuntimeError(f"{answers.count(False)} pages were not deleted")


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
