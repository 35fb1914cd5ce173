"""The targets find faults: each fault is put back, and found within five thousand inputs."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fuzz.catalogue import Target
from fuzz.generated import first_finding
from hicache_backends.hf3fs.slot_files import SlotFiles
from hicache_backends.redis import page_io
from hicache_backends.redis.replies import Reply, WrongReply

from hicache_storage import durations
from hicache_storage.page_store.frame import Framing

pytestmark = pytest.mark.no_cover

INPUTS = 5000


def assert_found(name: str, owner: object, attribute: str, fault: object) -> None:
    """Put a fault back. Expect an input that the target misjudges only with the fault."""
    target = Target.load(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, attribute, fault)
        found = first_finding(target, INPUTS)

    assert found is not None
    target.check(found[1])


def test_a_frame_whose_payload_is_not_compared_is_found() -> None:
    """With the fault, a frame with the right fields passes whatever its payload is."""
    right = Framing.errors

    def errors(self: Framing, pages: Any, hashes: Any, checksums: Any = None) -> Any:
        found = right(self, pages, hashes, checksums)
        return {at: error for at, error in found.items() if "payload" not in error.detail}

    assert_found("frames", Framing, "errors", errors)


def test_a_slot_with_one_mark_that_passes_for_a_page_is_found() -> None:
    """With the fault, a slot passes whose write stopped between the first and the last mark."""
    right = SlotFiles._marks

    def marks(self: SlotFiles, files: Any, slot: int) -> tuple[bytes, bytes]:
        head, _ = right(self, files, slot)
        return head, head

    assert_found("slots", SlotFiles, "_marks", marks)


def test_a_unit_that_only_unicode_takes_for_one_is_found() -> None:
    """With the fault, the pattern accepts the long s of old prints as the unit `s`."""
    pattern = durations._WITH_UNIT.pattern

    assert_found("scalars", durations, "_WITH_UNIT", re.compile(pattern, re.IGNORECASE))


def test_a_reader_that_does_not_look_at_the_end_of_a_page_is_found() -> None:
    """With the fault, a page passes whose bulk string has lost or gained bytes."""
    right = page_io._PageReader.read

    def read(self: Any, page: Any, position: int, settle: Any, *, more: bool) -> Reply:
        try:
            return right(self, page, position, settle, more=more)
        except WrongReply:
            if bytes(self._end) != page_io._END:
                return True
            raise

    assert_found("resp_pages", page_io._PageReader, "read", read)
