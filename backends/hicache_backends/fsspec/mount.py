"""An open filesystem: its executor and its files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from hicache_backends.fsspec.executors import EventLoopExecutor, Executor, ThreadExecutor
from hicache_backends.fsspec.files import Files
from hicache_backends.fsspec.results import is_outage
from hicache_backends.fsspec.settings import fsspec, protocol_name
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import BackendNotInstalled, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from hicache_backends.fsspec.executors import Result
    from hicache_backends.fsspec.protocols import Protocol, Publishing

T = TypeVar("T")
Item = TypeVar("Item")

_CLIENT_LIMIT_S = 30.0
"""The limit for making a client. Some clients read megabytes of their own data, whatever the store."""
_BLOCKING_GUESS_S = 1e-4
_NETWORK_GUESS_S = 1e-3


class Mount:
    """A filesystem that one process has opened. Thread-safe."""

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
        merged = _merge(protocol.options(parallelism), options) | {"skip_instance_cache": True}
        self._executor: Executor
        if self._blocking:
            self._executor = ThreadExecutor(parallelism)
        else:
            executor = self._executor = EventLoopExecutor(parallelism)
            merged |= {"asynchronous": True, "loop": executor.loop}

        def open_filesystem() -> tuple[Any, str]:
            opened: tuple[Any, str] = fsspec.url_to_fs(url, **merged)
            return opened

        self.files = Files(protocol, publishing, open_filesystem, blocking=self._blocking)

    def connect(self, timeout_s: float, *, collect: bool) -> None:
        """Make the client, and check that the store answers. `collect`: remove files of dead writers.

        Raises:
            Exception: Any exception of the filesystem.
        """
        if not self._blocking:
            _check_success(
                self._executor.each(self.files.connect, [None], Deadline(_CLIENT_LIMIT_S))
            )
        deadline = Deadline(timeout_s)
        _check_success(self.each(self.files.check, [None], deadline))
        if collect:
            _check_success(self.each(self.files.collect, [None], deadline))

    def each(
        self,
        operation: Callable[[Item], Coroutine[Any, Any, T]],
        items: Sequence[Item],
        deadline: Deadline,
    ) -> list[Result[T]]:
        """Run an operation on each item. Return one result per item, by the deadline.

        A blocking filesystem that answered nothing is disconnected, and the next call connects it
        again: few filesystems do that themselves, and some wait forever for a lost reply.

        Raises:
            StorageClosed: The mount is closed, or was closed during the call.
        """
        results = self._executor.each(operation, items, deadline)
        if self._blocking and results and all(is_outage(result.error) for result in results):
            self.files.close_connections()
        return results

    def attempt(
        self,
        operation: Callable[[Item], Coroutine[Any, Any, T]],
        item: Item,
        limit_s: float,
        deadline: Deadline,
    ) -> Result[T]:
        """Return the result of one item. Give up after `limit_s` if calls can be interrupted."""
        left_s = deadline.remaining_s()
        limit = deadline if self._blocking else Deadline(min(limit_s, left_s))
        (result,) = self._executor.each(operation, [item], limit)
        return result

    @property
    def page_guess_s(self) -> float:
        """The time that one page of a lookup is expected to take, until it is measured."""
        return _BLOCKING_GUESS_S if self._blocking else _NETWORK_GUESS_S

    def close(self) -> None:
        """End the threads and the connections. Call this once."""
        self._executor.close(self.files.disconnect)


def _class_of(url: str) -> Any:
    name = protocol_name(url)
    try:
        return fsspec.get_filesystem_class(name)
    except ImportError as error:
        raise BackendNotInstalled(
            f"fsspec: {name}:// needs a package besides fsspec: {error}"
        ) from None
    except ValueError:
        raise ConfigError(f"fsspec: url: no filesystem is known as {name!r}") from None


def _check_success(results: Sequence[Result[None]]) -> None:
    for result in results:
        if result.error is not None:
            raise result.error


def _merge(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Merge options, nested mappings too. The user's options, `theirs`, take precedence."""
    merged = {**ours, **theirs}
    for name in ours.keys() & theirs.keys():
        if isinstance(ours[name], dict) and isinstance(theirs[name], dict):
            merged[name] = _merge(ours[name], theirs[name])
    return merged
