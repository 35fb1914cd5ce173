"""OpenTelemetry spans that stay in memory, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

if TYPE_CHECKING:
    import pytest
    from opentelemetry.sdk.trace import ReadableSpan


class Spans:
    """A tracer provider, and the spans that it made."""

    def __init__(self) -> None:
        self.provider = TracerProvider(shutdown_on_exit=False)
        self._exporter = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    @classmethod
    def of_process(cls, monkeypatch: pytest.MonkeyPatch) -> Spans:
        """Return a tracer provider that is the provider of the process until the test ends."""
        spans = cls()
        monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: spans.provider)
        return spans

    def named(self, name: str) -> list[ReadableSpan]:
        """Return the ended spans with this name."""
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def only(self, name: str) -> ReadableSpan:
        """Return the only span with this name."""
        (span,) = self.named(name)
        return span


def is_child(span: ReadableSpan, of: ReadableSpan) -> bool:
    return (
        span.parent is not None
        and of.context is not None
        and span.parent.span_id == of.context.span_id
    )
