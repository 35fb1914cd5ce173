"""Open the observers that a configuration asks for. An observer that is not used is not imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.errors import ConfigError, install_command

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_storage.events.settings import EventSettings, HashFormat
    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store.observer import Attributes, Observer


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSource:
    """A process of an engine that publishes KV events, and the form of these events."""

    settings: EventSettings
    announces: Callable[[KeySpace], bool]
    """A function that returns True if the pages of a key space get events."""
    hash_format: HashFormat
    """The form of block hashes in the engine's own events."""
    rank: int | None = None
    """The data parallel rank."""


def open_observers(
    *, tracing: bool, attributes: Attributes, events: EventSource | None = None
) -> list[Observer]:
    """Return the observers of a page store, which the caller closes. Each span gets the `attributes`.

    Raises:
        ConfigError: An extra is missing, or an address of the events cannot be used.
    """
    observers = [_span_tracer(attributes)] if tracing else []
    return observers if events is None else [*observers, _event_observer(events)]


def _span_tracer(attributes: Attributes) -> Observer:
    try:
        from hicache_storage.tracing import SpanTracer  # noqa: PLC0415 - the extra is optional
    except ModuleNotFoundError as error:
        raise ConfigError(f'tracing: needs the extra "otel": {install_command("otel")}') from error
    return SpanTracer(attributes)


def _event_observer(source: EventSource) -> Observer:
    try:
        from hicache_storage.events.observer import EventObserver  # noqa: PLC0415 - as above
    except ModuleNotFoundError as error:
        raise ConfigError(
            f'events: need the extra "events": {install_command("events")}'
        ) from error
    return EventObserver(
        source.settings,
        announces=source.announces,
        hash_format=source.hash_format,
        rank=source.rank,
    )
