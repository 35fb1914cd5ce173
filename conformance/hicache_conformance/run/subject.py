"""The store under test: its class, its config, and the back doors that its author opens."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, cast

from hicache_conformance.run.outcomes import NotVerified

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage


@dataclass(frozen=True, slots=True)
class Scratch:
    """A directory and a name for one test alone."""

    path: Path
    """A fresh directory, removed after the test."""
    prefix: str
    """A token unique to this test, in [a-z0-9]: for key prefixes, buckets, tables."""


class Server(Protocol):
    """A real server that checks of faults may stop. Its data need not survive `stop`."""

    def stop(self) -> None: ...
    def start(self) -> None:
        """Start the server again on the same address, and return when it answers."""
        ...

    def pause(self) -> None:
        """Let the server accept connections but answer nothing (SIGSTOP)."""
        ...

    def resume(self) -> None: ...


class Subject:
    """The description of a store for the kit. One instance serves one test."""

    storage_class: ClassVar[type[HiCacheStorage]]

    absent: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """The operations that the store lacks, in whole or in part, because it was not written for the
    interface. Each has a text that says what is missing: `{"batch_delete": "it deletes no single
    page"}`.

    If the store refuses one of them with UnsupportedOperation, the check that called it is
    `not_verified`, with this text. `page_store` stands for the layer above a storage, which finds
    flipped bits. A store without this layer must find them itself. The verdict on a store that
    lacks operations is `partial` at best.
    """

    def config(self, scratch: Scratch) -> Mapping[str, Any]:
        """Return the config of a fresh, empty store. The same `scratch` gives the same store."""
        raise NotImplementedError(f"{type(self).__name__} has no config(self, scratch)")

    def peek(self, space: KeySpace, page_hash: str) -> bytes | None:
        """Return the page's bytes as they lie in the store, or None (a back door)."""
        raise _missing("peek", space, page_hash)

    def tamper(self, space: KeySpace, page_hash: str, data: bytes | None) -> None:
        """Replace a page with `data` of any length, without the store; None removes it (a back door)."""
        raise _missing("tamper", space, page_hash, data)

    def server(self) -> AbstractContextManager[Server]:
        """Return a real server of the test's own, for checks that stop and pause it (a back door).

        In these checks the kit calls `config` inside the server's context, and `config` must name
        this server. In all other checks it calls `config` without the context, and `config` must
        name a store that exists anyway. Leave this method out if your store has no server.
        """
        raise _missing("server")

    def small_config(self, scratch: Scratch, capacity_nbytes: int) -> Mapping[str, Any]:
        """Return the config of a store that about `capacity_nbytes` of pages fill (a back door).

        Define it only if your store's config has no `capacity_nbytes`, which the kit sets by
        itself.
        """
        raise _missing("small_config", scratch, capacity_nbytes)

    def stall(self) -> AbstractContextManager[None]:
        """Return a context in which another process holds what a call must wait for (a back door).

        For example, the other process holds the lock of the store. The kit enters the context while
        a handle is open.
        """
        raise _missing("stall")

    def cut_power(self) -> None:
        """Take everything that the store has written but not synced, as a power cut does (a back door).

        The kit calls it when no process uses the store. For example, start the server again on the
        last snapshot of its disk that contains only what was synced.
        """
        raise _missing("cut_power")

    def compose(self, scratch: Scratch, members: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the config of a fresh store that consists of `members`, the fastest first.

        Define it if your store keeps its pages in other stores (KV-6xx). Each member is a store of the
        kit, as `{"name", "backend", "config"}` for `hicache_storage.registry.open_storage`. Set short
        time limits and cool-downs, below a second. If copies between members are optional, turn them on.
        """
        raise _missing("compose", scratch, members)

    def offers(self, back_door: str) -> bool:
        """Return True if a subclass opened the back door with this name."""
        return getattr(type(self), back_door) is not getattr(Subject, back_door)


def _missing(back_door: str, *_: object) -> NotVerified:
    return NotVerified(f"needs the back door `{back_door}`")


@dataclass(frozen=True, slots=True)
class ClassReference:
    """A class by name, for use in another process."""

    module: str
    name: str
    path: str
    """The file of the module, for modules that no import finds, such as pytest's."""

    @classmethod
    def of(cls, target: type) -> Self:
        """Return the reference to a class at the top level of a module.

        Raises:
            NotVerified: The class was made inside a function, where another process can't find it.
        """
        module = sys.modules.get(target.__module__)
        if "<locals>" in target.__qualname__ or module is None:
            raise NotVerified(
                f"{target.__qualname__} can't be imported by another process: define it at the top"
                " of a module"
            )
        return cls(target.__module__, target.__qualname__, getattr(module, "__file__", None) or "")

    def load(self) -> type[HiCacheStorage]:
        """Import the class."""
        try:
            return self._in(importlib.import_module(self.module))
        except (ImportError, AttributeError):
            if not self.path:
                raise
        spec = importlib.util.spec_from_file_location(self.module, self.path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module
        spec.loader.exec_module(module)
        return self._in(module)

    def _in(self, module: Any) -> type[HiCacheStorage]:
        found: Any = module
        for part in self.name.split("."):
            found = getattr(found, part)
        return cast("type[HiCacheStorage]", found)
