"""Another process that uses the store, for checks of crashes and of sharing.

`Child` starts a fresh interpreter. It never forks, because clients of stores have threads. The
interpreter imports the storage class by name and runs one actor, a function at the top level of a
module of the kit:

    def actor(link: Link, *arguments): ...

The two processes take turns and send each other pickled values over a pipe.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from hicache_conformance.case.probe import Probe, Trace
from hicache_conformance.run.attribution import blamed
from hicache_conformance.run.outcomes import NotVerified, Unknown, Violation
from hicache_conformance.run.subject import ClassReference
from hicache_conformance.tools.network.endpoints import endpoints_in
from hicache_conformance.tools.processes.interpreter import start_interpreter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicache_storage.storage import HiCacheStorage

START_LIMIT_S = 60.0
_PARENT_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class _ChildRequest:
    """The first message to a child."""

    storage: ClassReference | None
    config: dict[str, Any]
    module: str
    actor: str
    arguments: tuple[Any, ...]
    absent: dict[str, str]


@dataclass(frozen=True, slots=True)
class _ActorFailure:
    """The last message of a child whose actor raised."""

    error: str
    cause: Violation | NotVerified | None = None


@dataclass
class Link:
    """The child's side of the pipe."""

    connection: Connection
    reference: ClassReference | None
    config: dict[str, Any]
    absent: Mapping[str, str] = field(default_factory=dict[str, str])
    trace: Trace = field(default_factory=Trace)

    def open(self, *, alone: bool = True) -> Probe:
        """Return a handle on the case's store. The actor closes it, or dies with it.

        With `alone`, no other process sets the pages that this process sets.
        """
        label = f"process{os.getpid()}"
        return Probe(
            self.open_storage(),
            self.trace,
            label,
            alive=lambda: not endpoints_in(self.config),
            absent=self.absent,
            alone=alone,
        )

    def open_storage(self) -> HiCacheStorage:
        """Return a storage of the case's config without a probe around it."""
        assert self.reference is not None, "this child was started without a storage class"
        return self.reference.load().from_config(self.config)

    def send(self, value: Any) -> None:
        self.connection.send(value)

    def receive(self) -> Any:
        return self.connection.recv()


class Child:
    """The parent's side of one process. `with Child(...)` always ends the process, by its pid."""

    def __init__(
        self,
        storage_class: type[HiCacheStorage] | None,
        config: Mapping[str, Any],
        actor: Callable[..., None],
        *arguments: Any,
        absent: Mapping[str, str] = MappingProxyType({}),
        temporary: str | None = None,
        owns_group: bool = False,
    ) -> None:
        """Start the process.

        `temporary` is the process's directory for temporary files. With `owns_group`, all processes
        that it starts end with it.
        """
        request = _ChildRequest(
            ClassReference.of(storage_class) if storage_class else None,
            dict(config),
            actor.__module__,
            actor.__qualname__,
            arguments,
            dict(absent),
        )
        self._connection, child_end = Pipe()
        environment = {"TMPDIR": temporary or tempfile.gettempdir()}
        with child_end:
            self.process = start_interpreter(
                __name__, child_end, environment=environment, owns_group=owns_group
            )
        self._owns_group = owns_group
        self._connection.send_bytes(pickle.dumps(request))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._connection.close()

    def send(self, value: Any) -> None:
        # `receive` reports a child that has died.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send(value)

    def receive(self, limit_s: float = START_LIMIT_S) -> Any:
        """Return the next value that the child sends.

        Raises:
            EOFError: The child has died.
            Violation, NotVerified: The actor raised one.
            Unknown: The child sent nothing in time, or the actor raised something else.
        """
        if not self._connection.poll(limit_s):
            raise Unknown(f"another process did not answer for {limit_s:.0f} s")
        try:
            message = self._connection.recv()
        except ConnectionResetError as error:
            raise EOFError from error
        if isinstance(message, _ActorFailure):
            if message.cause is not None:
                raise message.cause
            raise Unknown(f"in another process: {message.error}")
        return message

    def kill(self, limit_s: float = 10.0) -> int:
        """Send SIGKILL if the process still lives. Return its return code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        code = self.process.wait(limit_s)
        self._end_group()
        return code

    def wait(self, limit_s: float = START_LIMIT_S) -> int:
        """Wait until the process has ended by itself. Return its code, negative for a signal."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise Unknown(f"another process did not end within {limit_s:.0f} s") from None
        self._end_group()
        return code

    def _end_group(self) -> None:
        """Kill the group of the process, once only, because others may get its number afterwards."""
        if self._owns_group:
            self._owns_group = False
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


def main() -> None:
    """Read the request, run the actor and send its failure."""
    connection = Connection(int(sys.argv[1]))
    request: _ChildRequest = pickle.loads(connection.recv_bytes())  # noqa: S301 - from the parent, over a pipe
    actor: Callable[..., None] = getattr(importlib.import_module(request.module), request.actor)
    run_actor(
        Link(connection, request.storage, request.config, request.absent),
        os.getppid(),
        actor,
        *request.arguments,
    )


def run_actor(link: Link, parent: int, actor: Callable[..., None], *arguments: Any) -> None:
    """Run an actor in this process, a child of `parent`, and send its failure."""
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    try:
        actor(link, *arguments)
    except (Violation, NotVerified) as cause:
        link.send(_ActorFailure(str(cause), cause))
    except (EOFError, BrokenPipeError):
        pass  # The parent has gone or has closed the pipe.
    except Exception as error:  # noqa: BLE001 - it is sent to the parent
        violation = blamed(error, link.reference.load() if link.reference else None)
        link.send(_ActorFailure(f"{type(error).__name__}: {error}", violation))


def _end_with_parent(parent: int) -> None:
    """End this process when its parent has gone: an actor that waits for nothing would live on."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)


if __name__ == "__main__":
    # The parent can unpickle only values of the module's own name, which is not "__main__".
    importlib.import_module("hicache_conformance.tools.processes.child").main()
