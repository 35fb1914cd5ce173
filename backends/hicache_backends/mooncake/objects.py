"""Objects in the cluster: their states, small reads, and removal.

A function with a parameter `native` is a task for `Client.call`, or part of one. It raises
`MasterFailed` if the master did not answer.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from hicache_backends.mooncake.client import MasterFailed, checked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hicache_backends.mooncake.client import Client
    from hicache_storage.backend_support.deadline import Deadline

_MISSING = -704
_UNFINISHED = -703
_REMOVE_BATCH = 4096
"""How many keys the master removes in a short time. After a timeout, earlier batches stay removed."""
_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.1
_ATTEMPT_S = 0.2
"""The time that an attempt needs. A shorter attempt would leave the result of a removal unknown."""


class KeyStates(NamedTuple):
    """The states of the keys of a set. A key that is in no field is absent."""

    present: set[str]
    """Keys that contain a page."""
    wrong_size: set[str]
    """Keys whose object has a wrong size."""
    unfinished: set[str]
    """Keys whose writer has not finished, or has died."""


def key_states(
    native: Any, keys: Sequence[str], codes: Sequence[int], page_nbytes: int
) -> KeyStates:
    """Return the states of `keys` before a put. `codes` is the result of `presence` for the keys.

    We need them because a put over an existing object reports success but keeps the old bytes.
    """
    existing = [key for key, code in zip(keys, codes, strict=True) if code == 1]
    sizes = object_sizes(native, existing)
    present = {key for key in sizes if may_be_whole(sizes[key], page_nbytes)}
    absent = [key for key in keys if key not in sizes]
    unfinished = {key for key, code in _session_codes(native, absent) if code == _UNFINISHED}
    return KeyStates(present, sizes.keys() - present, unfinished)


def presence(native: Any, keys: Sequence[str]) -> list[int]:
    """Return 1 for each key that exists, and 0 for each other key.

    Raises:
        MasterFailed: The client returned another code.
    """
    codes: list[int] = native.batch_is_exist(keys)
    if any(code not in (0, 1) for code in codes):
        raise MasterFailed
    return codes


def object_sizes(native: Any, keys: Sequence[str]) -> dict[str, set[int]]:
    """Return the sizes of the complete replicas of each existing object, if the replicas report them.

    Raises:
        MasterFailed: An existing object was not described. The client omits keys without an answer.
    """
    if not keys:
        return {}
    descriptions = native.batch_get_replica_desc(keys)
    omitted = [key for key in keys if not descriptions.get(key)]
    if omitted and 1 in presence(native, omitted):
        raise MasterFailed
    return {
        key: {nbytes for replica in replicas if (nbytes := _replica_nbytes(replica)) is not None}
        for key, replicas in descriptions.items()
        if replicas
    }


def may_be_whole(sizes: set[int] | None, nbytes: int) -> bool:
    """Return False for an object that is absent, or whose known sizes all differ from `nbytes`.

    The size of a replica on a client's disk is unknown. Reading the replica checks it.
    """
    return sizes is not None and (not sizes or nbytes in sizes)


def _replica_nbytes(replica: Any) -> int | None:
    if replica.is_memory_replica():
        size: int = replica.get_memory_descriptor().buffer_descriptor.size
        return size
    if replica.is_disk_replica():
        stored: int = replica.get_disk_descriptor().object_size
        return stored
    return None


def not_stored(native: Any, keys: Sequence[str]) -> set[str]:
    """Return the keys that are unfinished or absent.

    The result of a put does not show this: a put over an unfinished object reports success.
    """
    return {key for key, code in _session_codes(native, keys) if code != 0}


def _session_codes(native: Any, keys: Sequence[str]) -> list[tuple[str, int]]:
    """Begin and end a read session. Only its codes distinguish unfinished objects from absent ones."""
    if not keys:
        return []
    codes = checked(native.batch_get_session_start(keys))
    results = list(zip(keys, codes, strict=True))
    begun = [key for key, code in results if code == 0]
    if begun:
        native.batch_get_session_end(begun)
    return results


def read_small(key: str, native: Any) -> bytes:
    """Return a small object, or b"" if it is absent.

    The client also returns b"" if a `get` was not answered, so an empty result is checked.
    """
    data: bytes = native.get(key)
    if not data and presence(native, [key]) == [1]:
        raise MasterFailed
    return data


# --- removal -----------------------------------------------------------------------------------------


def remove_unleased(
    client: Client, keys: set[str], deadline: Deadline, *, before_attempt: Callable[[], None]
) -> set[str]:
    """Remove objects as their leases end. Return the keys that are leased until the deadline.

    Removal is never forced. A forced removal would free a page's memory while somebody reads it,
    and the reader would get the bytes of another page.
    """
    for _ in _attempts(deadline):
        before_attempt()
        leased: set[str] = set()
        ordered = sorted(keys)
        for start in range(0, len(ordered), _REMOVE_BATCH):
            batch = ordered[start : start + _REMOVE_BATCH]
            codes = client.call(partial(remove, batch, deadline), deadline)
            leased.update(
                key for key, code in zip(batch, codes, strict=True) if not _is_removed(code)
            )
        keys = leased
        if not keys:
            break
    return keys


def remove(keys: Sequence[str], deadline: Deadline, native: Any) -> list[int]:
    """Remove objects without force. Return the client's codes.

    Raises:
        StorageTimeout: The deadline has passed. A later removal could delete pages that the caller
            has set again.
    """
    deadline.check("mooncake: a removal")
    return checked(native.batch_remove(list(keys), False))


def _is_removed(code: int) -> bool:
    """Return True if the page was removed, was absent, or is unfinished."""
    return code in (0, _MISSING, _UNFINISHED)


def _attempts(deadline: Deadline) -> Iterator[None]:
    """Yield at once, then after growing pauses, while there is time for an attempt.

    When an object is read or looked up, the master leases it for some seconds.
    """
    pause_s = _FIRST_PAUSE_S
    yield
    while deadline.remaining_s() > pause_s + _ATTEMPT_S:
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        yield
