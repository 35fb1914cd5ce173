"""OpenTelemetry spans of the calls of a page store. Needs the extra `otel`.

    store = PageStore(storage, observers=[SpanTracer()])

The spans go to the tracer provider of the process. docs/tracing.md is the guide.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode, use_span

from hicache_storage.page_store.observer import Activity, Observer
from hicache_storage.page_store.results import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from opentelemetry.trace import Span, TracerProvider
    from opentelemetry.util.types import AttributeValue

    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store.observer import Attributes, Clearance, Deletion, Lookup, Move

_NO_FAILURE = frozenset((Verdict.OK, Verdict.MISS, Verdict.REFUSED, Verdict.NOT_ADMITTED))
"""Verdicts that do not make a span an error. A store that is full has answered, too."""


class SpanTracer(Observer):
    """An observer that makes a span for each call and each activity. Thread-safe."""

    def __init__(
        self,
        attributes: Attributes | None = None,
        *,
        tracer_provider: TracerProvider | None = None,
    ) -> None:
        """Take a tracer of `tracer_provider`, or of the process's own provider.

        Every span has `attributes`, with "hicache." in front of their names.
        """
        self._tracer = trace.get_tracer("hicache_storage", tracer_provider=tracer_provider)
        self._attributes = _named(attributes or {})

    def begin(self, name: str, attributes: Attributes) -> Activity:
        span = self._tracer.start_span(
            f"hicache.{name}", attributes={**self._attributes, **_named(attributes)}
        )
        return _SpanActivity(span)

    def looked_up(self, lookup: Lookup, began_ns: int) -> None:
        name = "present" if lookup.prefix_pages is None else "match"
        self._record(name, began_ns, lambda: _lookup_attributes(lookup), lookup.failures)

    def moved(self, move: Move, began_ns: int) -> None:
        verdicts = (verdict for of_one in move.outcome.verdicts for verdict in of_one)
        self._record(move.direction, began_ns, lambda: _move_attributes(move), verdicts)

    def deleted(self, deletion: Deletion, began_ns: int) -> None:
        self._record(
            "delete",
            began_ns,
            lambda: {
                "hicache.pools": _pools([deletion.space]),
                "hicache.pages": len(deletion.hashes),
                "hicache.pages.gone": len(deletion.gone),
            },
        )

    def cleared(self, clearance: Clearance, began_ns: int) -> None:
        self._record(
            "clear",
            began_ns,
            lambda: {
                "hicache.pools": _pools([clearance.space]),
                "hicache.pages": clearance.pages,
            },
        )

    def _record(
        self,
        name: str,
        began_ns: int,
        attributes: Callable[[], Mapping[str, AttributeValue]],
        verdicts: Iterable[Verdict | None] = (),
    ) -> None:
        """Record a call that has ended, as a child of the span that is current in this thread."""
        start_ns = began_ns - time.monotonic_ns() + time.time_ns()  # the time of day
        span = self._tracer.start_span(f"hicache.{name}", kind=SpanKind.CLIENT, start_time=start_ns)
        if span.is_recording():
            span.set_attributes({**self._attributes, **attributes()})
            failures = {verdict for verdict in verdicts if verdict} - _NO_FAILURE
            if failures:
                names = sorted(verdict.value for verdict in failures)
                span.set_status(StatusCode.ERROR, ", ".join(names))
        span.end()


class _SpanActivity(Activity):
    """The span of an activity. Several threads may make it their current span."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._ended = False

    def resume(self) -> AbstractContextManager[object]:
        return use_span(self._span, record_exception=False, set_status_on_exception=False)

    def end(self, attributes: Attributes) -> None:
        if not self._ended:
            self._ended = True
            self._span.set_attributes(_named(attributes))
            self._span.end()


def _named(attributes: Attributes) -> dict[str, AttributeValue]:
    return {f"hicache.{name}": value for name, value in attributes.items()}


def _pools(spaces: Iterable[KeySpace]) -> Sequence[str]:
    """Return the names of the pools, without repetitions."""
    return list(dict.fromkeys(space.pool for space in spaces))


def _lookup_attributes(lookup: Lookup) -> Mapping[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "hicache.pools": _pools(lookup.spaces),
        "hicache.pages": len(lookup.hashes),
    }
    if lookup.prefix_pages is not None:
        return {**attributes, "hicache.pages.prefix": lookup.prefix_pages}
    answers = Counter(lookup.answers[0])
    return {
        **attributes,
        "hicache.pages.present": answers[True],
        "hicache.pages.absent": answers[False],
        "hicache.pages.unanswered": answers[None],
    }


def _move_attributes(move: Move) -> Mapping[str, AttributeValue]:
    tally = Counter(verdict for of_one in move.outcome.verdicts for verdict in of_one)
    return {
        "hicache.pools": _pools(transfer.space for transfer in move.transfers),
        "hicache.pages": sum(tally.values()),
        "hicache.nbytes": sum(
            verdicts.count(Verdict.OK) * transfer.space.page_nbytes
            for transfer, verdicts in zip(move.transfers, move.outcome.verdicts, strict=True)
        ),
        **{f"hicache.pages.{verdict.value}": pages for verdict, pages in tally.items()},
    }
