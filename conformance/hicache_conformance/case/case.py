"""What one check uses: fresh storages, key spaces and pages, and the assertions about them."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import secrets
import tempfile
import threading
import time
import weakref
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hicache_conformance.case import retention_baseline
from hicache_conformance.case.assertions import Assertions, Forgot
from hicache_conformance.case.probe import Probe, ServerGone, Trace, require_present
from hicache_conformance.rules import CLAIMS, Need
from hicache_conformance.run.cleanup import remove_pages
from hicache_conformance.run.outcomes import NotDeclared, NotVerified
from hicache_conformance.run.subject import Scratch
from hicache_conformance.tools.content.content import content
from hicache_conformance.tools.network.endpoints import endpoints_in
from hicache_conformance.tools.observation.files import remove_tree
from hicache_conformance.tools.processes.child import Child
from hicache_conformance.tools.processes.machine import MachineDelay
from hicache_storage.backend_support.read_only import ReadOnlyStorage
from hicache_storage.errors import StorageClosed, StorageUnavailable
from hicache_storage.keys import KeySpace, Shard
from hicache_storage.page import Page
from hicache_storage.storage import Durability, HiCacheStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from hicache_conformance.run.subject import Server, Subject
    from hicache_storage.storage import Capabilities


__all__ = ["Case", "Forgot"]

_MOST_REFUSAL_PROBES = 8
"""How many probes a check makes at most to find out if a store is willing to accept pages."""


_NESTING = ("s", "s")
"""Folders around a case's scratch space. A store that follows `..` can't reach another case."""


LEFT_IN_STORE = "left in the store"
"""The name of the evidence about a check's pages that could not be removed."""


class Case(Assertions):
    """One run of one check. Use it once; at its end it closes and removes all that it made.

    The seed determines `space`, `hashes` and `contents`, except for a token, which keeps runs on
    one deployed store apart.
    """

    def __init__(self, subject: Subject, *, seed: str = "0", quick: bool = False) -> None:
        self.subject = subject
        self.quick = quick
        self.random = random.Random(seed)
        self.trace = Trace()
        self.evidence: dict[str, str] = {}
        """Counts and figures of the check, shown in the report."""
        self.changed_fields: dict[str, Any] = {}
        """The fields of the config that `reconfigure` has changed."""
        self._began_s = time.monotonic()
        self._delay = MachineDelay()
        self._shortest_limit_s = math.inf
        self._stack = ExitStack()
        self._opened = 0
        self._storages: list[HiCacheStorage] = []
        self._probes: list[Probe] = []
        self._forgetful = False
        self._refused: set[int] = set()
        self._refusal_probes = 0
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._directory = self._make_directory()
        self.scratch = self.new_scratch()
        self._config: dict[str, Any] | None = None
        self._opened_configs: list[Mapping[str, Any]] = []
        self._server_has_gone = False
        self._stack.callback(self._remove_pages)  # runs after every handle is closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # --- the store ---------------------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any]:
        """The config of this case's store."""
        if self._config is None:
            self._config = dict(self.subject.config(self.scratch))
        return self._config

    def reconfigure(self, **fields: Any) -> None:
        """Change fields of the config for storages that are opened from now on."""
        self.changed_fields |= fields
        self._config = {**self.config, **fields}
        self._claims = None

    def compose(self, members: Sequence[Mapping[str, Any]]) -> None:
        """Let this case's store be a fresh composition of `members` from now on."""
        self._config = dict(self.subject.compose(self.new_scratch(), members))
        self._claims = None

    @property
    def elapsed_s(self) -> float:
        """How many seconds have passed since the check began."""
        return time.monotonic() - self._began_s

    def new_scratch(self) -> Scratch:
        """Return a directory and a name for one more store."""
        path = self._directory / f"{next(self._numbers)}"
        path.mkdir()
        return Scratch(path, f"hc{secrets.token_hex(6)}")

    def at_end(self, callback: Callable[[], object]) -> None:
        """Call `callback` after the check, before handles that are open now are closed."""
        self._stack.callback(callback)

    def open(self, config: Mapping[str, Any] | None = None, *, label: str = "") -> Probe:
        """Open a handle on this case's store, or on the store of `config`. The case will close it."""
        storage = self.open_storage(config)
        self._opened += 1
        name = label or ("store" if self._opened == 1 else f"store{self._opened}")
        probe = Probe(
            storage, self.trace, name, alive=self.alive, reluctant=self.refuses, absent=self.absent
        )
        self._probes.append(probe)
        return probe

    def open_read_only(self) -> Probe:
        """Open a read-only handle on this case's store, as `registry.open_storage` does.

        Raises:
            NotVerified: The store can't be opened to read only.
        """
        self.require_present("open_read_only")
        opened = self.subject.storage_class.open_read_only(self.config)
        storage = ReadOnlyStorage(opened)
        self._storages.append(storage)
        self._stack.callback(_close, storage)
        return Probe(storage, self.trace, "looker", alive=self.alive, absent=self.absent)

    def open_storage(self, config: Mapping[str, Any] | None = None) -> HiCacheStorage:
        """Open a storage without a probe, for checks of calls that the contract allows to fail.

        Raises:
            NotVerified: A store that claims not to be shared can't be opened twice.
        """
        fields = self.config if config is None else dict(config)
        try:
            storage = self.subject.storage_class.from_config(fields)
        except StorageUnavailable as error:
            if any(map(_is_open, self._storages)) and not self.claims.shared:
                raise NotVerified(f"the store opens one handle at a time: {error}") from error
            raise
        self._storages.append(storage)
        if config is not None:
            self._opened_configs.append(fields)
        if config is None and self._claims is None:
            self._claims = storage.capabilities
        self._stack.callback(_close, storage)
        return storage

    def hurries(self, limit_s: float) -> None:
        """Note that the check gives the store a time limit that a busy machine may exceed."""
        self._shortest_limit_s = min(self._shortest_limit_s, limit_s)

    @property
    def was_held_up(self) -> bool:
        """True if the store may have missed a limit because the machine ran something else."""
        return self._delay.so_far_s() > self._shortest_limit_s

    def look_again(self) -> None:
        """Assert at the end of a check that refused pages are still absent.

        Handles that are closed, or whose server has gone, are left out.
        """
        for probe in self._probes:
            with suppress(ServerGone, StorageClosed):
                if _is_open(probe.storage):
                    probe.look_again()

    def close_storages(self) -> None:
        """Close every storage before its server stops."""
        for storage in self._storages:
            _close(storage)

    def child(self, actor: Callable[..., None], *arguments: Any) -> Child:
        """Start a process that runs `actor(link, *arguments)` on this store until the check ends."""
        return self._stack.enter_context(
            Child(self.subject.storage_class, self.config, actor, *arguments, absent=self.absent)
        )

    def alive(self) -> bool:
        """Return True if a new handle stores a page, or if the config has no server."""
        if not endpoints_in(self.config):
            return True
        space = self.space(min(64, self.claims.max_page_nbytes or 64), tenant="alive")
        pages = self.contents(space, self.hashes(1))
        try:
            with self.subject.storage_class.from_config(self.config) as storage:
                storage.open_space(space)
                return storage.batch_set(space, *_given(pages)) == [True]
        except Exception:  # noqa: BLE001 - every error means that the store is down
            return False

    def _make_directory(self) -> Path:
        """Make the directory of all scratches. If the check hangs, a finalizer removes it."""
        made = Path(tempfile.mkdtemp(prefix="hicache-conformance-"))
        self._stack.callback(weakref.finalize(self, remove_tree, made))
        room = made.joinpath(*_NESTING)
        room.mkdir(parents=True)
        return room

    def _remove_pages(self) -> None:
        """Remove the check's pages from stores that outlive it. Note in `evidence` which pages stay."""
        left = [
            remaining
            for config in self._outliving_configs()
            if (remaining := self._remaining(config))
        ]
        if left:
            self.evidence[LEFT_IN_STORE] = "; ".join(left)

    def give_up(self) -> None:
        """Note in `evidence` that the check's pages stay in the store because the check did not end."""
        if self._outliving_configs():
            self.evidence[LEFT_IN_STORE] = f"pages of {self.scratch.prefix}: it did not end"

    def _outliving_configs(self) -> list[Mapping[str, Any]]:
        """Return the configs of the stores that outlive the check together with their pages."""
        if self._server_has_gone or self._config is None:
            return []
        opened = [self._config, *self._opened_configs]
        unique = [config for place, config in enumerate(opened) if config not in opened[:place]]
        return [config for config in unique if str(self._directory) not in str(config)]

    def _remaining(self, config: Mapping[str, Any]) -> str:
        """Remove the check's pages from one store. Return a text about pages that are left, or ""."""
        token = self.scratch.prefix
        try:
            with self.subject.storage_class.from_config(config) as storage:
                return remove_pages(storage, self.trace.stored, token)
        except Exception as error:  # noqa: BLE001 - opening may raise any error
            if config != self._config:
                return ""  # this store had an address of the check's own, which has gone
            return f"pages of {token}: {type(error).__name__}: {error}"[:300]

    @contextmanager
    def server(self) -> Generator[Server, None, None]:
        """Run a server for this case alone. Enter the context before the first `open`."""
        assert self._config is None, "the config is of a server that runs"
        with self.subject.server() as server:
            try:
                yield server
            finally:
                self.close_storages()
                self._server_has_gone = True

    # --- claims ------------------------------------------------------------------------------------

    @property
    def claims(self) -> Capabilities:
        """The claims of an instance, which may be narrower than the claims of its class."""
        if self._claims is None:
            storage = self.subject.storage_class.from_config(self.config)
            self._claims = storage.capabilities
            _close(storage)
        return self._claims

    _claims: Capabilities | None = None

    def require(self, *needs: Need) -> None:
        """End the check if the store lacks a claim, or the author a back door, that the check needs."""
        for need in sorted(needs, key=lambda one: one not in CLAIMS):  # a claim decides first
            if not self._has(need):
                kind = _CLAIM_WORDS.get(need)
                if kind:
                    raise NotDeclared(f"the store does not claim {kind}")
                raise NotVerified(f"needs the back door `{need}`")

    def _has(self, need: Need) -> bool:
        match need:
            case Need.DURABLE | Need.SYNCED:
                least = Durability.CRASH if need is Need.DURABLE else Durability.POWER
                return self.claims.durability >= least
            case Need.SHARED | Need.ENUMERABLE | Need.BOUNDED | Need.REVOCABLE:
                return bool(getattr(self.claims, need.value))
            case Need.COMPOSES:
                return self.subject.offers(need.value)
            case Need.PARALLEL:
                return self.claims.parallelism > 1
            case Need.PEEK | Need.TAMPER | Need.SERVER | Need.STALL | Need.CUT_POWER:
                return self.subject.offers(need.value)
            case Need.ENDPOINT:
                return True  # the checks themselves read the config

    @property
    def absent(self) -> Mapping[str, str]:
        """The operations that the store lacks."""
        return self.subject.absent

    def require_present(self, operation: str) -> None:
        """End the check if the store lacks the operation."""
        require_present(operation, self.absent)

    # --- identities and bytes ----------------------------------------------------------------------

    def space(self, page_nbytes: int = 1024, **changes: Any) -> KeySpace:
        """Return a key space that no other case has, with `changes` to its fields."""
        return replace(
            KeySpace(
                model=f"conformance/{self.scratch.prefix}",
                dtype="bfloat16",
                layout="page_first",
                page_tokens=16,
                page_nbytes=page_nbytes,
                shard=Shard(layers=(0, 32), heads=(0, 8)),
            ),
            **changes,
        )

    def hashes(self, count: int) -> list[str]:
        """Return page hashes that are new in this case."""
        return [hashlib.sha256(self.random.randbytes(16)).hexdigest() for _ in range(count)]

    def contents(
        self, space: KeySpace, hashes: Sequence[str], version: int = 0
    ) -> dict[str, bytes]:
        """Return the contents of pages. Every cell of 32 bytes names its page, version and offset."""
        return {
            page_hash: content(space.id, page_hash, space.stored_nbytes, version)
            for page_hash in hashes
        }

    # --- retention baseline ------------------------------------------------------------------------

    def refuses(self, nbytes: int) -> bool:
        """Return True if a fresh store refuses pages of this size, or as many as the check has set."""
        with self._lock:
            if nbytes not in self._refused and self._refusal_probes < _MOST_REFUSAL_PROBES:
                if retention_baseline.refuses(self, nbytes):
                    self._refused.add(nbytes)
                else:
                    self._refusal_probes += 1
            return nbytes in self._refused

    def forgets(self, probe: Probe) -> bool:
        """Return True if the store forgets pages for no reason. The result is cached."""
        self._forgetful = self._forgetful or retention_baseline.forgets(self, probe)
        return self._forgetful


def _close(storage: HiCacheStorage) -> None:
    """Close a storage after a check. Ignore its errors, because the checks of close find them."""
    with suppress(Exception):
        storage.close()


def _is_open(storage: HiCacheStorage) -> bool:
    try:
        storage.ensure_open()
    except StorageClosed:
        return False
    return True


def _given(pages: Mapping[str, bytes]) -> tuple[list[str], list[Page]]:
    return list(pages), [Page(bytearray(data)) for data in pages.values()]


_CLAIM_WORDS = {
    Need.DURABLE: "durability CRASH or more",
    Need.SYNCED: "durability POWER",
    Need.SHARED: "shared",
    Need.ENUMERABLE: "enumerable",
    Need.PARALLEL: "parallelism above 1",
    Need.BOUNDED: "bounded",
    Need.REVOCABLE: "revocable",
    Need.COMPOSES: "to consist of other stores: its test class has no `compose`",
}
