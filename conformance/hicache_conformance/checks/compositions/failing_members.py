"""KV-601: a member of a composition that is down."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.scenarios.composition import PAGES, composed
from hicache_conformance.scenarios.setup import note
from hicache_conformance.tools.composition.members import Phase, Trouble

if TYPE_CHECKING:
    from hicache_conformance.case.case import Case

_CALLS = 4
"""So many calls open the breaker of a member."""
_POSITIONS = range(3)


@check("KV-601")
def reads_go_on_while_a_member_is_down(case: Case) -> None:
    """If one member is down, the pages of the others are hits. When it is back, so are its own."""
    served = 0
    for position in _POSITIONS:
        with composed(case) as one:
            pages = one.stored()
            member = one.members[position]
            member.fail(Trouble.DOWN)
            with note(f"member {member.name!r} is down"):
                for _ in range(_CALLS):
                    served += one.must_serve(pages, but=member)
            one.mend()
            with note(f"member {member.name!r} was down"):
                one.must_recover(pages)
    case.evidence["hits beside a member that is down"] = f"{served}"


@check("KV-601")
def sets_go_on_while_a_member_is_down(case: Case) -> None:
    """If one member is down, or its answers are lost, the others take pages, and keep them."""
    for position in _POSITIONS:
        for phase in Phase:
            with composed(case) as one:
                pages = one.stored()
                member = one.members[position]
                member.fail(Trouble.DOWN, phase=phase)
                taken: dict[str, bytes] = {}
                with note(f"member {member.name!r} is down {phase.value}"):
                    for _ in range(_CALLS):
                        fresh = one.new_pages()
                        answers = one.put(fresh).answer or [False] * len(fresh)
                        if not any(answers):
                            raise one.violation(
                                "no page can be stored because one member is down",
                                f"True for some of {PAGES} pages: two members work",
                                "False for each of them",
                            )
                        kept = {h: fresh[h] for h, ok in zip(fresh, answers, strict=True) if ok}
                        taken |= kept
                        one.must_serve(kept, but=member)
                one.mend()
                one.must_recover(pages | taken)


@check("KV-601")
def without_any_member_calls_raise(case: Case) -> None:
    """If no member answers, a call raises, and does not report misses. Afterwards it works again."""
    with composed(case) as one:
        pages = one.stored()
        for member in one.members:
            member.fail(Trouble.DOWN)
        for _ in range(_CALLS):
            for attempt in (
                one.exists(list(pages)),
                one.get(list(pages)),
                one.put(one.new_pages()),
                one.delete(list(pages)),
            ):
                if attempt.error is None:
                    raise one.violation(
                        f"{attempt.operation} answers although no member does",
                        "StorageUnavailable or StorageTimeout",
                        attempt.text,
                    )
        one.mend()
        one.must_recover(pages)
