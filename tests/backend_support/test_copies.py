from __future__ import annotations

import pytest
import xxhash

from hicache_storage.backend_support.copies import copy_pages
from hicache_storage.page import Page

DATA = bytes(range(48))


def test_pages_are_copied_between_any_segments() -> None:
    targets = [Page(bytearray(30), bytearray(18)), Page(bytearray(48))]

    copy_pages(targets, [Page(DATA), Page(DATA[:5], DATA[5:])])

    assert [DATA, DATA] == [target.tobytes() for target in targets]
    assert [None, None] == [target.digest for target in targets]


def test_a_copy_has_a_digest_where_its_page_asks_for_one() -> None:
    target = Page(bytearray(48))
    target.digest_skip = 8

    copy_pages([target], [Page(DATA)])

    assert xxhash.xxh3_64_intdigest(DATA[8:]) == target.digest


def test_pages_of_other_sizes_are_not_copied() -> None:
    target = Page(bytearray(47))
    with pytest.raises(ValueError, match="do not fit together"):
        copy_pages([target], [Page(DATA)])

    assert bytes(47) == target.tobytes()
