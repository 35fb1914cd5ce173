"""A store and a dict that receive the same calls, and must agree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hicache_conformance.run.outcomes import Violation
from hicache_conformance.scenarios.setup import fitting
from hicache_storage.storage import Durability

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_storage.keys import KeySpace

PAGES = 5
SPACES = {"kv": 100, "draft": 33, "swa": 100}
"""Three small pools: two with pages of the same size, and one with another size."""


@dataclass(frozen=True, slots=True)
class Step:
    """One call. Its handles, key spaces and pages are numbers."""

    kind: str
    """The name: `set`, `get`, `exists`, `delete`, `open`, `clear`, `scan`, `reopen` or `agree`."""
    handle: int = 0
    space: int = 0
    pages: tuple[int, ...] = ()


class ModelPair:
    """A store and a dict. If they disagree, `Violation` is raised with the steps so far.

    A read may return a version that was set since the last delete. If a present page was set again,
    several versions are possible.
    """

    def __init__(self, case: Case, name: str, config: Mapping[str, Any] | None = None) -> None:
        """Open the handles, on the store of `config` if given, otherwise on the case's store."""
        self.case = case
        self._config = config
        self.steps: list[Step] = []
        self._lines: list[str] = []
        self._spaces = [
            case.space(fitting(case, nbytes), pool=pool, tenant=name)
            for pool, nbytes in SPACES.items()
        ]
        self._hashes = case.hashes(PAGES)
        self._held: dict[tuple[int, int], list[int]] = {}
        self._version = 0
        self._handles = [self._opened(number) for number in range(2 if case.claims.shared else 1)]
        self._kinds = {
            "set": self._set,
            "get": self._get,
            "exists": self._exists,
            "delete": self._delete,
            "open": self._open,
            "clear": self._clear,
            "scan": self._scan,
            "reopen": self._reopen,
            "agree": self._agree,
        }

    @staticmethod
    def outlives_handle(case: Case) -> bool:
        """Return whether pages are still there after a handle was closed and opened again."""
        return case.claims.durability >= Durability.CRASH

    @property
    def handles(self) -> int:
        return len(self._handles)

    def apply(self, step: Step) -> None:
        """Apply a step to the store and the dict."""
        self.steps.append(step)
        self._lines.append(f"{len(self.steps)}. {self._text(step)}")
        try:
            self._kinds[step.kind](step)
        except Violation as violation:  # The violation of a single call has no sequence yet.
            violation.sequence = self._lines
            raise

    def close(self) -> None:
        for handle in self._handles:
            handle.close()

    # --- steps ---------------------------------------------------------------------------------------

    def _set(self, step: Step) -> None:
        self._version += 1
        self._lines[-1] += f", version {self._version}"
        contents = {
            self._hashes[page]: self._data(step.space, page, self._version) for page in step.pages
        }
        space = self._space(step)
        verdicts = self._handles[step.handle].set(space, contents)
        for page, taken in zip(step.pages, verdicts, strict=True):
            if taken:
                self._now_held(step.space, page)
            elif not self.case.refuses(space.stored_nbytes):
                raise self._disagreement("batch_set is False", "True: there is room", page)

    def _get(self, step: Step) -> None:
        hashes = [self._hashes[page] for page in step.pages]
        found = self._handles[step.handle].get(self._space(step), hashes)
        for page, data in zip(step.pages, found, strict=True):
            versions = self._held.get((step.space, page), [])
            contents = [self._data(step.space, page, version) for version in versions]
            if data is None:
                self._missed("batch_get", step.space, page)
            elif data not in contents:
                space, page_hash = self._spaces[step.space], self._hashes[page]
                what = self.case.diagnosed(space, page_hash, data, contents)
                self._hit("batch_get", versions, page, what)

    def _exists(self, step: Step) -> None:
        hashes = [self._hashes[page] for page in step.pages]
        seen = self._handles[step.handle].exists(self._space(step), hashes)
        for page, there in zip(step.pages, seen, strict=True):
            if there and (step.space, page) not in self._held:
                self._hit("batch_exists", [], page, "")
            elif not there:
                self._missed("batch_exists", step.space, page)

    def _delete(self, step: Step) -> None:
        hashes = [self._hashes[page] for page in step.pages]
        verdicts = self._handles[step.handle].delete(self._space(step), hashes)
        for page, deleted in zip(step.pages, verdicts, strict=True):
            if not deleted:
                raise self._disagreement("batch_delete is False", "True: it is gone", page)
            self._held.pop((step.space, page), None)

    def _open(self, step: Step) -> None:
        self._handles[step.handle].open_space(self._space(step))

    def _clear(self, step: Step) -> None:
        removed = self._handles[step.handle].clear(self._space(step))
        held = [key for key in self._held if key[0] == step.space]
        if removed > len(held) or (self.case.keeps and removed < len(held)):
            raise self._disagreement(f"clear returns {removed}", f"{len(held)} pages")
        for key in held:
            del self._held[key]

    def _scan(self, step: Step) -> None:
        infos = self._handles[step.handle].scan(self._space(step))
        listed = sorted(info.page_hash for info in infos)
        held = sorted(self._hashes[page] for other, page in self._held if other == step.space)
        lacking = self.case.keeps and len(listed) < len(held)
        if lacking or not set(listed) <= set(held) or len(listed) > len(held):
            raise self._disagreement(f"scan lists {self._names(listed)}", self._names(held))

    def _reopen(self, step: Step) -> None:
        self._handles[step.handle].close()
        self._handles[step.handle] = self._opened(step.handle)

    def _agree(self, _: Step) -> None:
        """Read everything through every handle. Key spaces that no step used are left out."""
        touched = sorted({step.space for step in self.steps})
        for handle in range(self.handles):
            for space in touched:
                everything = Step("agree", handle, space, tuple(range(PAGES)))
                self._get(everything)
                self._exists(everything)

    # --- parts ---------------------------------------------------------------------------------------

    def _opened(self, number: int) -> Probe:
        handle = self.case.open(self._config, label=f"handle{number}")
        for space in self._spaces:
            handle.open_space(space)
        return handle

    def _space(self, step: Step) -> KeySpace:
        return replace(self._spaces[step.space])  # The copy is equal, but never the same object.

    def _data(self, space: int, page: int, version: int) -> bytes:
        page_hash = self._hashes[page]
        return self.case.contents(self._spaces[space], [page_hash], version)[page_hash]

    def _now_held(self, space: int, page: int) -> None:
        versions = self._held.setdefault((space, page), [])
        if not (versions and self.case.keeps and not self.case.claims.overwrites):
            versions.append(self._version)

    def _missed(self, operation: str, space: int, page: int) -> None:
        if (space, page) in self._held and self.case.keeps:
            raise self._disagreement(f"{operation} is False", "True: it was set", page)

    def _hit(self, operation: str, versions: Sequence[int], page: int, what: str) -> None:
        expected = " or ".join(f"version {version}" for version in versions)
        got = f"{operation} is True" + (f": {what}" if what else "")
        raise self._disagreement(got, expected or "False: no such page is there", page)

    def _disagreement(self, got: str, expected: str, page: int | None = None) -> Violation:
        note = "the store disagrees with a dict" + ("" if page is None else f" about page {page}")
        return Violation(f"{note}: {got.partition(':')[0]}", expected, got)

    def _text(self, step: Step) -> str:
        description = [step.kind]
        if step.pages:
            description.append(f"page {', '.join(map(str, step.pages))}")
        if step.kind == "agree":
            return "get and exists of everything"
        if step.kind != "reopen":
            description.append(f"of {self._spaces[step.space].pool!r}")
        if self.handles > 1:
            description.append(f"by handle {step.handle}")
        return " ".join(description)

    def _names(self, hashes: Sequence[str]) -> str:
        known = {page_hash: f"page {page}" for page, page_hash in enumerate(self._hashes)}
        return ", ".join(known.get(page_hash, page_hash) for page_hash in hashes) or "nothing"
