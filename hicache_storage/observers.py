"""The observers that a configuration asks for. Each is imported only where it is wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.errors import ConfigError

if TYPE_CHECKING:
    from hicache_storage.page_store.observer import Attributes, Observer


def open_observers(*, tracing: bool, attributes: Attributes) -> list[Observer]:
    """Return the observers of a page store. The spans of `tracing` have `attributes`.

    Raises:
        ConfigError: An extra is missing. The message names it.
    """
    return [_span_tracer(attributes)] if tracing else []


def _span_tracer(attributes: Attributes) -> Observer:
    try:
        from hicache_storage.tracing import SpanTracer  # noqa: PLC0415 - the extra is optional
    except ModuleNotFoundError as error:
        raise ConfigError(
            'tracing: needs the extra "otel": pip install "hicache-storage[otel]"'
        ) from error
    return SpanTracer(attributes)
