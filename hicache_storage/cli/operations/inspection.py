"""Collect the facts about one key space, or about one page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache_storage.cli.ages import format_time
from hicache_storage.cli.operations.batches import PageMemory
from hicache_storage.cli.operations.proofs import PageProver, Proof
from hicache_storage.native.reference.frames import FRAME_FIELDS, FRAME_NBYTES

if TYPE_CHECKING:
    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage, PageTimes

_CHECKSUMMED = 1


def space_facts(storage: HiCacheStorage, space: KeySpace) -> dict[str, Any]:
    """Return the manifest of a key space, and the number of its pages."""
    pages = sum(1 for _ in storage.scan(space))
    return {
        "id": space.id,
        **space.manifest(),
        "stored_nbytes": space.stored_nbytes,
        "pages": pages,
        "total_nbytes": pages * space.stored_nbytes,
    }


def page_facts(
    storage: HiCacheStorage, space: KeySpace, page_hash: str
) -> tuple[dict[str, Any], bool]:
    """Return the facts about a page, such as its times and frame, and True if the page is right."""
    (times,) = storage.page_times(space, [page_hash])
    (memory,) = PageMemory(space, 1, storage.capabilities.alignment).views(1)
    (found,) = PageProver(storage, space).read([page_hash], [memory])
    facts: dict[str, Any] = {
        "space": space.id,
        "hash": page_hash,
        "proof": found.proof.value,
        "detail": found.detail,
        "stored_nbytes": space.stored_nbytes,
    }
    if found.proof is not Proof.GONE:
        facts |= _times(times)
    if found.is_read and found.proof is not Proof.NO_FRAME:
        facts["frame"] = frame_fields(memory)
    return facts, found.proof is Proof.OK


def _times(times: PageTimes) -> dict[str, str]:
    """Return the times that the store has recorded."""
    known = {"written_at": times.written_at_s, "used_at": times.used_at_s}
    return {name: format_time(at_s) for name, at_s in known.items() if at_s is not None}


def frame_fields(memory: memoryview) -> dict[str, Any]:
    """Return the fields in a page's frame, exactly as they are stored."""
    magic, version, flags, nbytes, checksum, space_id, length, digest = FRAME_FIELDS.unpack_from(
        memory[:FRAME_NBYTES]
    )
    return {
        "magic": magic.decode("ascii", "backslashreplace"),
        "version": version,
        "checksum": f"{checksum:016x}" if flags & _CHECKSUMMED else None,
        "payload_nbytes": nbytes,
        "space": space_id.hex(),
        "hash": digest[:length].hex(),
    }
