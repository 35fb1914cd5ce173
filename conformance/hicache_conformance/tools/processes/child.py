"""Another process that uses the store: for what survives a death, and for what processes share.

`Child` starts a fresh interpreter (never a fork: clients of stores have threads) that imports the
storage class by name and runs one actor, a function at the top of a module of the kit:

    def actor(link: Link, *arguments): ...

The two talk over a pipe in turns of pickled values.
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
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from hicache_conformance.case.probe import Probe, Trace
from hicache_conformance.run.attribution import blamed
from hicache_conformance.run.outcomes import NotVerified, Unknown, Violation
from hicache_conformance.run.subject import ClassReference
from hicache_conformance.tools.network.endpoints import endpoints_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicache_storage.storage import HiCacheStorage

START_LIMIT_S = 60.0
_PARENT_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class _ChildRequest:
    """What a child is told first."""

    storage: ClassReference | None
    config: dict[str, Any]
    module: str
    actor: str
    arguments: tuple[Any, ...]
    absent: dict[str, str]


@dataclass(frozen=True, slots=True)
class _ActorFailure:
    """What a child says last when its actor raised."""

    error: str
    cause: Violation | NotVerified | None = None


@dataclass
class Link:
    """The child's side."""

    connection: Connection
    reference: ClassReference | None
    config: dict[str, Any]
    absent: Mapping[str, str] = field(default_factory=dict[str, str])
    trace: Trace = field(default_factory=Trace)

    def open(self, *, alone: bool = True) -> Probe:
        """A handle on the case's store. The actor closes it, or dies with it.

        `alone`: no other process sets the pages that this one sets.
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
        """The same, bare."""
        assert self.reference is not None, "this child was started without a storage class"
        return self.reference.load().from_config(self.config)

    def send(self, value: Any) -> None:
        self.connection.send(value)

    def receive(self) -> Any:
        return self.connection.recv()


class Child:
    """The parent's side of one process. `with Child(...)` ends it by its pid, whatever happened."""

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
        """`temporary`: its directory for temporary files. `owns_group`: what it starts ends with it."""
        request = _ChildRequest(
            ClassReference.of(storage_class) if storage_class else None,
            dict(config),
            actor.__module__,
            actor.__qualname__,
            arguments,
            dict(absent),
        )
        self._connection, theirs = Pipe()
        environment = {
            **os.environ,
            "TMPDIR": temporary or tempfile.gettempdir(),
            "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
        }
        with theirs:
            self.process = subprocess.Popen(  # noqa: S603 - this interpreter, our module
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0 if owns_group else None,
            )
        self._owns_group = owns_group
        self._connection.send_bytes(pickle.dumps(request))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._connection.close()

    def send(self, value: Any) -> None:
        # A child that has died is noticed when it is listened to.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send(value)

    def receive(self, limit_s: float = START_LIMIT_S) -> Any:
        """The next value that the child says.

        Raises:
            EOFError: It died without another word.
            Violation, NotVerified: Its actor raised one.
            Unknown: It said nothing in time, or its actor raised something else.
        """
        if not self._connection.poll(limit_s):
            raise Unknown(f"another process said nothing for {limit_s:.0f} s")
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
        """SIGKILL it, if it still lives; its return code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        code = self.process.wait(limit_s)
        self._end_group()
        return code

    def wait(self, limit_s: float = START_LIMIT_S) -> int:
        """Until it has ended by itself; its return code, negative for a signal."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise Unknown(f"another process did not end within {limit_s:.0f} s") from None
        self._end_group()
        return code

    def _end_group(self) -> None:
        """Kill what it has started, once: the number is the group's only while there is one."""
        if self._owns_group:
            self._owns_group = False
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


def main() -> None:
    """The child: read the order, run the actor, tell how it failed."""
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
    """Run an actor in this process, a child of `parent`, and tell how it failed."""
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    try:
        actor(link, *arguments)
    except (Violation, NotVerified) as cause:
        link.send(_ActorFailure(str(cause), cause))
    except (EOFError, BrokenPipeError):
        pass  # the parent has gone, or ended the conversation
    except Exception as error:  # noqa: BLE001 - it is told to the parent
        violation = blamed(error, link.reference.load() if link.reference else None)
        link.send(_ActorFailure(f"{type(error).__name__}: {error}", violation))


def _end_with_parent(parent: int) -> None:
    """An actor that is not listening would outlive a parent that was killed."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)


if __name__ == "__main__":
    # Under its own name, or what it says could not be unpickled by the parent.
    importlib.import_module("hicache_conformance.tools.processes.child").main()
