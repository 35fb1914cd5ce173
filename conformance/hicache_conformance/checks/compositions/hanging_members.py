"""KV-602: a member of a composition that does not answer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.run.outcomes import NotVerified
from hicache_conformance.scenarios.composition import composed
from hicache_conformance.scenarios.setup import note
from hicache_conformance.tools.composition.members import READS, WRITES, Phase, Trouble
from hicache_conformance.tools.processes.resources import ProcessResources, resident_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_conformance.case.case import Case
    from hicache_conformance.scenarios.composition import Composition
    from hicache_conformance.tools.composition.members import Member

_HANGS = (
    (READS + WRITES, Phase.BEFORE),
    (("batch_get",), Phase.AFTER),
    (READS + WRITES, Phase.AFTER),
    (("batch_set",), Phase.BEFORE),
    (("batch_exists",), Phase.BEFORE),
    (("batch_delete",), Phase.AFTER),
)
_ALWAYS = 2
"""How many of these `--quick` tries."""
_POSITIONS = range(3)
_NOTICED_AFTER = 3
_CALLS = 5
_FEW_PAGES = 8
_LARGE_NBYTES = 64 << 10
_STILL_S = 1.0
_STILL_WITHIN_S = 8.0
_REPEATS = 15
_HUNG_CALLS = 10
_SPARE_THREADS = 2


@check("KV-602")
def a_hung_member_delays_a_call_by_its_limit(case: Case) -> None:
    """If one member hangs until its limit, each call ends in time, and soon nothing else is lost."""
    for operations, phase in _HANGS[: _ALWAYS if case.quick else None]:
        which = operations[0] if len(operations) == 1 else "each call"
        for position in _POSITIONS:
            with composed(case) as one:
                pages = one.stored()
                member = one.members[position]
                member.fail(Trouble.HUNG, phase=phase, operations=operations)
                with note(f"member {member.name!r} hangs in {which}, {phase.value}"):
                    for turn in range(_CALLS):
                        _call_each(one, pages, member, is_noticed=turn >= _NOTICED_AFTER)
                member.land()
                one.mend()
                one.must_recover(pages)


def _call_each(
    one: Composition, pages: dict[str, bytes], member: Member, *, is_noticed: bool
) -> None:
    """Make each call once. Each must end in time. If the hang `is_noticed`, judge the answers."""
    if is_noticed:
        one.must_serve(pages, but=member)
    one.get(list(pages))
    one.exists(list(pages))
    fresh = one.new_pages(_FEW_PAGES)
    one.put(fresh)
    one.delete(list(fresh))


@check("KV-602")
def a_member_without_a_limit_is_left_behind(case: Case) -> None:
    """If a member below the first never answers, calls whose pages can be revoked leave it behind."""
    for position in _POSITIONS[1:]:
        with composed(case, have_limits=False) as one:
            if "timeout_s" not in case.config:
                raise NotVerified("the composition has no `timeout_s` to leave a member behind at")
            pages = one.stored()
            member = one.members[position]
            member.fail(Trouble.HUNG)
            refused: list[str] = []
            with note(f"member {member.name!r} never answers"):
                for turn in range(_CALLS):
                    fresh = one.new_pages()
                    stored = one.lent("batch_set", fresh).answer or [True] * len(fresh)
                    refused += [h for h, ok in zip(fresh, stored, strict=True) if not ok]
                    hits = dict(zip(pages, one.lent("batch_get", pages).answer or (), strict=False))
                    there = one.exists(list(pages)).answer or ()
                    one.delete(list(one.new_pages(_FEW_PAGES)))
                    expected = one.whole_elsewhere(pages, member)
                    seen = {h for h, ok in zip(pages, there, strict=False) if ok and hits.get(h)}
                    if turn >= _NOTICED_AFTER and expected - seen:
                        raise one.violation(
                            "a call misses a page that a working member has",
                            f"{len(expected)} hits",
                            f"{len(seen & expected)} hits",
                        )
            one.mend()
            one.must_keep_off()
            one.must_recover(pages)
            one.must_hide(refused, "whose set returned False while a member hung")


@check("KV-602", quick=False)
def calls_that_hang_take_no_memory_from_others(case: Case) -> None:
    """However many large pages wait for a hung member, those of the other members are hits."""
    for wiped in (None, 0):
        with composed(case, have_limits=False, nbytes=_LARGE_NBYTES) as one:
            pages, absent = one.stored(_FEW_PAGES), one.new_pages()
            member = one.members[-1]
            member.fail(Trouble.HUNG)
            with note(f"member {member.name!r} never answers"):
                for _ in range(_HUNG_CALLS):
                    one.lent("batch_set", pages)
                    one.lent("batch_get", absent)
                if wiped is not None:
                    one.members[wiped].wipe()
                one.must_serve(pages, but=member)


@check("KV-602", quick=False)
def calls_behind_a_hung_member_keep_nothing(case: Case) -> None:
    """If a member never answers, many calls leave no more threads and memory behind than a few."""
    with composed(case, have_limits=False, nbytes=_LARGE_NBYTES) as one:
        pages = one.stored()
        one.members[-1].fail(Trouble.HUNG)
        absent = one.new_pages()

        def call_all() -> None:
            one.lent("batch_set", pages)
            one.lent("batch_get", absent)
            one.exists(list(absent))

        _repeat_until_still(call_all, one.members[-1])
        threads, nbytes = ProcessResources.current().threads, resident_nbytes()
        for _ in range(_REPEATS):
            call_all()
        more = ProcessResources.current().threads.total() - threads.total()
        grown = resident_nbytes() - nbytes
        passed = _REPEATS * len(pages) * one.space.stored_nbytes
        case.evidence["behind a hung member"] = f"{more:+} threads, {grown >> 10:+} KiB"
        if more > _SPARE_THREADS or grown > passed // 2:
            raise one.violation(
                "calls that a hung member did not answer keep threads or memory",
                f"about as much as {_REPEATS} calls of each kind earlier",
                f"{more} more threads, {grown >> 10} KiB more, for {passed >> 10} KiB of pages",
            )


def _repeat_until_still(call: Callable[[], None], member: Member) -> None:
    """Repeat calls until no more of them hang in the member for a while, or some time has passed."""
    began_s = still_since_s = time.monotonic()
    hanging = -1
    while time.monotonic() < min(still_since_s + _STILL_S, began_s + _STILL_WITHIN_S):
        call()
        if member.hanging > hanging:
            hanging, still_since_s = member.hanging, time.monotonic()
