from __future__ import annotations

from pathlib import Path
from threading import Thread

import pytest
from hicache_conformance.tools.composition.members import Member, MemberStorage, Phase, Trouble
from pages import blank, hash_of, page, space
from servers import wait_until

from hicache_storage.backend_support.revocable import AtomicRevocable
from hicache_storage.errors import ConfigError, StorageTimeout, StorageUnavailable
from hicache_storage.registry import open_storage
from hicache_storage.storage import HiCacheStorage

SPACE = space()
A, B = hash_of(1), hash_of(2)


@pytest.fixture
def member(tmp_path: Path) -> Member:
    return Member(str(tmp_path), "a")


def opened(member: Member) -> HiCacheStorage:
    return open_storage(member.config["backend"], member.config["config"])


def test_each_handle_sees_the_same_pages(member: Member) -> None:
    opened(member).batch_set(SPACE, [A], [page()])

    target = blank()
    assert [True, False] == opened(member).batch_get(SPACE, [A, B], [target, blank()])
    assert target.tobytes() == page().tobytes() == member.read(SPACE, A)


def test_a_member_of_another_process_is_refused() -> None:
    with pytest.raises(ConfigError, match="another process"):
        MemberStorage.from_config({"place": "elsewhere"})


def test_a_member_that_is_down_raises_before_or_after_the_effect(member: Member) -> None:
    storage = opened(member)
    member.fail(Trouble.DOWN)
    with pytest.raises(StorageUnavailable):
        storage.batch_set(SPACE, [A], [page()])
    assert not member.has(SPACE, A)

    member.fail(Trouble.DOWN, phase=Phase.AFTER)
    with pytest.raises(StorageUnavailable):
        storage.batch_set(SPACE, [A], [page()])
    assert member.has(SPACE, A)


def test_a_write_that_hung_lands_when_the_check_says_so(member: Member) -> None:
    member.fail(Trouble.HUNG, operations=("batch_set",))
    with pytest.raises(StorageTimeout):
        opened(member).batch_set(SPACE, [A], [page()])
    assert not member.has(SPACE, A)

    member.land()
    assert member.has(SPACE, A)


def test_a_member_without_a_limit_hangs_until_it_is_mended(tmp_path: Path) -> None:
    member = Member(str(tmp_path), "a", has_limit=False)
    member.fail(Trouble.HUNG)
    storage, answers = opened(member), list[bool]()
    thread = Thread(target=lambda: answers.extend(storage.batch_exists(SPACE, [A])))
    thread.start()
    wait_until(lambda: member.hanging == 1)
    assert not storage.capabilities.bounded
    assert [] == answers

    member.mend()
    thread.join(10)
    assert [False] == answers


def test_full_and_read_only_members_keep_what_they_have(member: Member) -> None:
    storage = opened(member)
    storage.batch_set(SPACE, [A], [page()])
    member.fail(Trouble.FULL)
    assert [False] == storage.batch_set(SPACE, [B], [page()])

    member.fail(Trouble.READ_ONLY)
    with pytest.raises(StorageUnavailable):
        storage.batch_set(SPACE, [B], [page()])
    assert [False] == storage.batch_delete(SPACE, [A])
    assert [True] == storage.batch_exists(SPACE, [A])


def test_a_held_call_has_had_its_effect_or_not(member: Member) -> None:
    storage = opened(member)
    for phase, there in ((Phase.BEFORE, False), (Phase.AFTER, True)):
        with member.holding("batch_set", phase) as gate:
            thread = Thread(target=storage.batch_set, args=(SPACE, [A], [page()]))
            thread.start()
            assert gate.reached.wait(10)
            assert there == member.has(SPACE, A)
        thread.join(10)
        member.wipe()


def test_a_revoked_page_is_neither_read_nor_written(member: Member) -> None:
    storage = opened(member)
    storage.batch_set(SPACE, [A], [page()])
    revocable = AtomicRevocable()
    revocable.revoke()
    target, source = blank(), page()
    target.revocable = source.revocable = revocable

    assert [False] == storage.batch_get(SPACE, [A], [target])
    assert [False] == storage.batch_set(SPACE, [B], [source])
    assert blank().tobytes() == target.tobytes()
