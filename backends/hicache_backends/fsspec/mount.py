"""One open filesystem: where its calls run, and its files."""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any, TypeVar

from hicache_backends.fsspec.errors import says_down
from hicache_backends.fsspec.executors import EventLoopLane, Lane, ThreadLane
from hicache_backends.fsspec.files import Files
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import BackendNotInstalled, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from hicache_backends.fsspec.executors import Answer
    from hicache_backends.fsspec.protocols import Protocol, Publishing

T = TypeVar("T")
Item = TypeVar("Item")

fsspec: Any = importlib.import_module("fsspec")  # it has no types

_CHAIN = "::"
_CLIENT_LIMIT_S = 30.0
"""Some clients read megabytes of their own data before they are ready, which no store delays."""
_BLOCKING_GUESS_S = 1e-4
_NETWORK_GUESS_S = 1e-3
_USER_OR_QUERY = re.compile(r"(?<=//).*@|[?#].*", re.DOTALL)


def protocol_name(url: str) -> str:
    """The name of the filesystem in a URL; `file` where there is none.

    Raises:
        ValueError: The URL chains several filesystems.
    """
    if _CHAIN in url:
        raise ValueError("must name one filesystem, without '::': pages go straight to it")
    name: str = fsspec.core.split_protocol(url)[0] or "file"
    return name


def without_secrets(url: str) -> str:
    """A URL for people: no user, no password, no query."""
    return _USER_OR_QUERY.sub("", url)


class Mount:
    """A filesystem that one process has opened."""

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any],
        *,
        protocol: Protocol,
        publishing: Publishing,
        parallelism: int,
    ) -> None:
        self._blocking = not _class_of(url).async_impl
        chosen = _merged(protocol.options(parallelism), options) | {"skip_instance_cache": True}
        self._lane: Lane
        if self._blocking:
            self._lane = ThreadLane(parallelism)
        else:
            lane = self._lane = EventLoopLane(parallelism)
            chosen |= {"asynchronous": True, "loop": lane.loop}

        def opening() -> tuple[Any, str]:
            found: tuple[Any, str] = fsspec.url_to_fs(url, **chosen)
            return found

        self.files = Files(protocol, publishing, opening, blocking=self._blocking)

    def connect(self, timeout_s: float) -> None:
        """Get ready, and see that the store answers.

        Raises what the filesystem raises.
        """
        if not self._blocking:
            _must_succeed(self._lane.each(self.files.connect, [None], Deadline(_CLIENT_LIMIT_S)))
        _must_succeed(self.each(self.files.check, [None], Deadline(timeout_s)))

    def each(
        self,
        operation: Callable[[Item], Coroutine[Any, Any, T]],
        items: Sequence[Item],
        deadline: Deadline,
    ) -> list[Answer[T]]:
        """Return one answer an item, by the deadline.

        A blocking filesystem that answered nothing is connected anew by the next call: few of them do
        so themselves, and some wait for ever for what they have lost.

        Raises:
            StorageClosed: It is closed, or was meanwhile.
        """
        answers = self._lane.each(operation, items, deadline)
        if self._blocking and answers and all(says_down(answer.error) for answer in answers):
            self.files.hang_up()
        return answers

    def attempt(
        self,
        operation: Callable[[Item], Coroutine[Any, Any, T]],
        item: Item,
        limit_s: float,
        deadline: Deadline,
    ) -> Answer[T]:
        """Return the answer to one item, given up after `limit_s` where calls can be interrupted."""
        left_s = deadline.remaining_s()
        limit = deadline if self._blocking else Deadline(min(limit_s, left_s))
        (answer,) = self._lane.each(operation, [item], limit)
        return answer

    @property
    def page_guess_s(self) -> float:
        """What looking for one page of many takes, before that is known."""
        return _BLOCKING_GUESS_S if self._blocking else _NETWORK_GUESS_S

    def close(self) -> None:
        """End the threads and the connections. Once."""
        self._lane.close(self.files.disconnect)


def _class_of(url: str) -> Any:
    name = protocol_name(url)
    try:
        return fsspec.get_filesystem_class(name)
    except ImportError as error:
        raise BackendNotInstalled(f"fsspec: {name}:// needs more than fsspec: {error}") from None
    except ValueError:
        raise ConfigError(f"fsspec: url: no filesystem is known as {name!r}") from None


def _must_succeed(answers: Sequence[Answer[None]]) -> None:
    for answer in answers:
        if answer.error is not None:
            raise answer.error


def _merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Our options and the user's, which come first; in nested mappings too."""
    merged = {**ours, **theirs}
    for name in ours.keys() & theirs.keys():
        if isinstance(ours[name], dict) and isinstance(theirs[name], dict):
            merged[name] = _merged(ours[name], theirs[name])
    return merged
