"""KV-603: a member of a composition that takes no pages, or whose writes arrive late."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.scenarios.composition import composed
from hicache_conformance.scenarios.setup import note
from hicache_conformance.tools.composition.members import Phase, Trouble

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.scenarios.attempts import Attempt
    from hicache_conformance.scenarios.composition import Composition
    from hicache_conformance.tools.composition.members import Member

_REFUSING = (Trouble.FULL, Trouble.READ_ONLY)
_LATE = (
    (Trouble.HUNG, Phase.BEFORE),
    (Trouble.HUNG, Phase.AFTER),
    (Trouble.DOWN, Phase.AFTER),
)
_POSITIONS = range(3)
_SET = ("batch_set",)
_WHY = "whose set returned False"


@check("KV-603")
def a_set_is_true_only_if_a_member_stored_the_page(case: Case) -> None:
    """If one member is full or read-only, True means that another has the page; False is a miss."""
    for trouble in _REFUSING:
        for position in _POSITIONS:
            with composed(case) as one:
                member = one.members[position]
                _try_to_store(one, [member], trouble, f"member {member.name!r}")


@check("KV-603")
def full_members_take_nothing(case: Case) -> None:
    """If each member is full, sets are False and raise nothing; if each is read-only, none is True."""
    for trouble in _REFUSING:
        with composed(case) as one:
            _try_to_store(one, one.members, trouble, "each member")


def _try_to_store(one: Composition, members: Sequence[Member], trouble: Trouble, who: str) -> None:
    """Set pages while `members` take none. Those that were refused must stay away afterwards."""
    pages = one.stored()
    for member in members:
        member.fail(trouble)
    with note(f"{who} {trouble.value}"):
        fresh = one.new_pages()
        refused = _judge(one, fresh, one.put(fresh))
        one.must_serve(pages)
    one.mend()
    one.must_recover(pages)
    one.must_hide(refused, _WHY)


@check("KV-603")
def a_refused_page_never_arrives_late(case: Case) -> None:
    """If a member's answer is lost and the others refuse, a page that was False stays away."""
    for trouble, phase in _LATE:
        for position in _POSITIONS:
            with composed(case) as one:
                pages = one.stored()
                for member in one.members:
                    member.fail(Trouble.FULL, operations=_SET)
                member = one.members[position]
                member.fail(trouble, phase=phase, operations=_SET)
                with note(f"member {member.name!r} {trouble.value} {phase.value}"):
                    fresh = one.new_pages()
                    refused = _judge(one, fresh, one.put(fresh))
                    _stay_away(one, pages, fresh, refused, late=position)


@check("KV-603")
def a_refused_page_never_arrives_after_it_was_left_behind(case: Case) -> None:
    """If a set leaves a hung member behind and is False, its page stays away when the member wakes."""
    for position in _POSITIONS[1:]:
        with composed(case, have_limits=False) as one:
            pages = one.stored()
            for member in one.members:
                member.fail(Trouble.FULL, operations=_SET)
            member = one.members[position]
            member.fail(Trouble.HUNG, operations=_SET)
            with note(f"member {member.name!r} is left behind"):
                fresh = one.new_pages()
                refused = _judge(one, fresh, one.lent("batch_set", fresh))
                _stay_away(one, pages, fresh, refused, late=position)


def _judge(one: Composition, fresh: dict[str, bytes], attempt: Attempt) -> list[str]:
    """Judge the answers to a set. Return the pages for which it said False."""
    answers: list[bool | None] = attempt.answer or [None] * len(fresh)
    for page_hash, taken in zip(fresh, answers, strict=True):
        if taken and not one.whole_elsewhere({page_hash: fresh[page_hash]}, None):
            raise one.violation(
                "batch_set is True for a page that no member has stored",
                "False, or an error if no member answered",
                f"True for {page_hash[:8]}",
                page_hash,
            )
    refused = [h for h, taken in zip(fresh, answers, strict=True) if taken is False]
    one.must_serve({h: fresh[h] for h, taken in zip(fresh, answers, strict=True) if taken})
    one.must_hide(refused, _WHY)
    return refused


def _stay_away(
    one: Composition,
    pages: dict[str, bytes],
    fresh: dict[str, bytes],
    refused: Sequence[str],
    *,
    late: int,
) -> None:
    """Let a late write arrive. Its pages stay away until they are set again, and can be removed."""
    member = one.members[late]
    member.land()
    one.mend()
    one.settle()
    one.must_recover(pages)
    one.must_hide(refused, f"{_WHY}, because a late write has arrived")
    if refused:
        again = {h: fresh[h] for h in refused}
        if all(one.put(again).answer or [False]):
            one.must_serve(again)
        gone = one.delete(refused).answer or ()
        one.must_be_gone(
            [h for h, ok in zip(refused, gone, strict=False) if ok], "that was deleted"
        )
