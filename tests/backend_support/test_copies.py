from __future__ import annotations

import pytest
import xxhash

from hicache_storage.backend_support.copies import copy_pages, copy_revocable
from hicache_storage.backend_support.revocable import AtomicRevocable
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


class TestCopyRevocable:
    def test_pages_of_any_segments_are_copied_in_chunks(self) -> None:
        data = bytes(range(256)) * 2048
        target = Page(bytearray(1000), bytearray(len(data) - 1000))
        target.revocable = AtomicRevocable()

        assert [True] == copy_revocable([target], [Page(data[:300_000], data[300_000:])])
        assert data == target.tobytes()

    def test_a_revoked_page_is_not_touched(self) -> None:
        revoked, other = Page(bytearray(48)), Page(bytearray(48))
        revoked.revocable = AtomicRevocable()
        revoked.revocable.revoke()

        assert [False, True] == copy_revocable([revoked, other], [Page(DATA), Page(DATA)])
        assert [bytes(48), DATA] == [revoked.tobytes(), other.tobytes()]

    @pytest.mark.parametrize(("skip", "digest"), [(8, 7), (0, None)])
    def test_the_digest_of_the_source_is_kept_if_it_is_the_one_wanted(
        self, skip: int, digest: int | None
    ) -> None:
        source, target = Page(DATA), Page(bytearray(48))
        source.digest, source.digest_skip, target.digest_skip = 7, 8, skip

        copy_revocable([target], [source])

        assert digest == target.digest

    def test_a_revocable_page_of_another_size_is_refused(self) -> None:
        target = Page(bytearray(47))
        target.revocable = AtomicRevocable()

        with pytest.raises(ValueError, match="do not fit together"):
            copy_revocable([target], [Page(DATA)])
