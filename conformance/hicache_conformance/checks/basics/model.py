"""KV-002: after any calls in any order, the store agrees with a dict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.run.outcomes import NotVerified

if TYPE_CHECKING:
    from hicache_conformance.case.case import Case


@check("KV-002")
def any_sequence_of_calls_agrees_with_a_dict(case: Case) -> None:
    """After any short sequence of calls, on any handle, the store holds what a dict would hold."""
    try:
        from hicache_conformance.scenarios.sequence_search import SequenceSearch  # noqa: PLC0415 - the kit works without hypothesis
    except ImportError as error:
        if error.name != "hypothesis":
            raise
        raise NotVerified("needs hypothesis: pip install 'hicache-storage[conformance]'") from None
    search = SequenceSearch(case, limit_s=1.5 if case.quick else 10.0)
    search.run(20 if case.quick else 80)
    case.evidence["sequences"] = str(search.sequences)
