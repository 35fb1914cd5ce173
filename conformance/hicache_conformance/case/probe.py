"""A probe of a storage: it records every call, guards memory and checks the type of every answer."""

from __future__ import annotations

from functools import partial
from itertools import islice
from types import GeneratorType, MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hicache_conformance.case.trace import Trace
from hicache_conformance.run.outcomes import NotDeclared, NotVerified, Violation
from hicache_conformance.tools.content.memory import PageMemory
from hicache_storage.errors import StorageTimeout, StorageUnavailable, UnsupportedOperation
from hicache_storage.keys import KeySpace
from hicache_storage.storage import PageInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from hicache_storage.page import Page
    from hicache_storage.storage import HiCacheStorage

__all__ = ["Probe", "ServerGone", "Trace", "space_text"]

T = TypeVar("T")

_IN_TIME = "an answer within the time limit of the call, or a smaller max_batch or max_batch_nbytes"
_MOST_LISTED = 200_000
_ANY = 1 << 30
"""More pages than any batch has."""
_OFFERS = 6
"""How often a page is set if the store refuses some sets now and then."""


class ServerGone(Exception):
    """The store stopped answering in a check that left its server alone: an error, not a violation."""


class Probe:
    """A storage, and the memory for its pages. Splits batches by its limits, as the SDK does.

    Methods without `batch_` in their name take and return bytes. In every check, an answer of a wrong
    type, an exception that the contract does not allow, or a byte outside a page is a violation.
    """

    def __init__(
        self,
        storage: HiCacheStorage,
        trace: Trace,
        label: str = "store",
        *,
        alive: Callable[[], bool] = lambda: False,
        reluctant: Callable[[int], bool] = lambda _: False,
        absent: Mapping[str, str] = MappingProxyType({}),
        alone: bool = True,
    ) -> None:
        self.storage = storage
        self.trace = trace
        self.label = label
        self._alive = alive
        self._reluctant = reluctant
        """Returns True if the store refuses some pages of this size. Refused ones are set again."""
        self.absent = absent
        """The operations that the store may refuse: `Subject.absent`."""
        self._alone = alone
        """True if the trace has every set, because no other process stores pages of this check."""
        self._refused: list[tuple[KeySpace, list[str]]] = []

    @property
    def max_batch(self) -> int:
        """The most hashes of one call."""
        return self.storage.capabilities.max_batch or _ANY

    def most_pages(self, space: KeySpace) -> int:
        """Return how many pages of `space` one get or set may have."""
        return self.storage.capabilities.fitting_pages(_ANY, space.stored_nbytes)

    def open_space(self, space: KeySpace) -> None:
        self._called("open_space", space, [], lambda: self.storage.open_space(space))

    def exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        answers: list[bool] = []
        for part in self._parts(hashes):
            answers += self.batch_exists(space, part)
        return answers

    def set(
        self, space: KeySpace, contents: Mapping[str, bytes], *, segments: int = 1
    ) -> list[bool]:
        """Store pages of `space` and return the verdicts, in the order of `contents`."""
        return self.set_items(space, list(contents.items()), segments=segments)

    def set_items(
        self, space: KeySpace, items: Sequence[tuple[str, bytes]], *, segments: int = 1
    ) -> list[bool]:
        """Store items in which a hash may occur twice."""
        answers: list[bool] = []
        for part in self._parts(items, self.most_pages(space)):
            hashes, data = [h for h, _ in part], [d for _, d in part]
            memory = self.memory(space, len(part), segments).filled_with(data)
            given = self.batch_set(space, hashes, memory.pages)
            if [page.tobytes() for page in memory.pages] != data:
                raise self.violation(
                    "batch_set changed the bytes of a page that it was given to store",
                    sequence=self.trace.sequence("batch_set"),
                )
            self._check_guards(memory, "batch_set")
            answers += given
        return answers

    def get(
        self, space: KeySpace, hashes: Sequence[str], *, segments: int = 1
    ) -> list[bytes | None]:
        """Return the bytes of each page, or None for a miss."""
        found: list[bytes | None] = []
        for part in self._parts(hashes, self.most_pages(space)):
            memory = self.memory(space, len(part), segments)
            hits = self.batch_get(space, part, memory.pages)
            self._check_guards(memory, "batch_get")
            found += [
                page.tobytes() if hit else None
                for hit, page in zip(hits, memory.pages, strict=True)
            ]
        return found

    def delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        answers: list[bool] = []
        for part in self._parts(hashes):
            answers += self.batch_delete(space, part)
        return answers

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        """Look up pages in one call, which receives `hashes` itself and not a copy."""
        return self._answers(
            "batch_exists", space, hashes, lambda: self.storage.batch_exists(space, hashes)
        )

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        """Delete pages in one call, which receives `hashes` itself and not a copy."""
        answers = self._answers(
            "batch_delete", space, hashes, lambda: self.storage.batch_delete(space, hashes)
        )
        self.trace.deleted(space, hashes, answers)
        return answers

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        """Set the caller's pages in one call. If a reluctant store refuses some, set them again."""
        answers = self._set_once(space, hashes, pages)
        for _ in range(_OFFERS - 1):
            refused = [place for place, taken in enumerate(answers) if not taken]
            if not refused or not self._reluctant(space.stored_nbytes):
                break
            again = self._set_once(
                space, [hashes[place] for place in refused], [pages[place] for place in refused]
            )
            for place, taken in zip(refused, again, strict=True):
                answers[place] = taken
        return answers

    def set_once(self, space: KeySpace, contents: Mapping[str, bytes]) -> list[bool]:
        """Store pages in one call. Refused pages are not set again."""
        memory = self.memory(space, len(contents)).filled_with(list(contents.values()))
        return self._set_once(space, list(contents), memory.pages)

    def look_again(self) -> None:
        """Assert that every refused page is still absent, unless somebody has set it since."""
        for space, hashes in self._refused:
            for part in self._parts(hashes):
                self._must_not_show(space, part, 0)

    def _set_once(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.trace.offered(space, hashes)
        answers = self._answers(
            "batch_set", space, hashes, lambda: self.storage.batch_set(space, hashes, pages)
        )
        self.trace.footprint += [space.stored_nbytes] * sum(answers)
        self.trace.stored[space].update(h for h, ok in zip(hashes, answers, strict=True) if ok)
        refused = [page_hash for page_hash, ok in zip(hashes, answers, strict=True) if not ok]
        if refused and self._alone:
            self._follow_up(space, refused)
        return answers

    def _follow_up(self, space: KeySpace, refused: Sequence[str]) -> None:
        """Assert KV-006 right after a set returned False: its page never shows."""
        tested = self._must_not_show(space, refused, 1)
        self.trace.withdrawn(space, tested)
        self._refused.append((space, tested))

    def _must_not_show(self, space: KeySpace, refused: Sequence[str], offers: int) -> list[str]:
        """Raise if a page is there although all its sets were refused. Return the tested pages.

        A page that another set may have stored is not tested.
        """
        tested = self.trace.offered_times(space, refused, offers)
        if not tested:
            return []
        there = self.batch_exists(space, tested)
        read = [data is not None for data in self.get(space, tested)]
        shown = [one for one, *seen in zip(tested, there, read, strict=True) if any(seen)]
        for page_hash in self.trace.offered_times(space, shown, offers):
            raise self.violation(
                "a page is there although its batch_set returned False",
                expected="a miss: a page that was refused never becomes visible (KV-006)",
                got=f"a hit for {page_hash[:8]}",
                sequence=self.trace.sequence(page_hash[:8]),
            )
        return tested

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        """Read pages into the caller's memory in one call."""
        return self._answers(
            "batch_get", space, hashes, lambda: self.storage.batch_get(space, hashes, pages)
        )

    def clear(self, space: KeySpace) -> int:
        removed = self.attempt("clear", space, [], lambda: self.storage.clear(space))
        if isinstance(removed, UnsupportedOperation):
            require_present("clear", self.absent)
            if not self.storage.capabilities.enumerable:
                raise NotDeclared("the store neither lists its pages nor clears its key spaces")
            raise self.violation(
                "a store that claims to be enumerable does not clear", got=_error_text(removed)
            )
        if type(removed) is not int:
            raise self.violation(
                "clear must return how many pages it removed", expected="an int", got=repr(removed)
            )
        return removed

    def scan(self, space: KeySpace) -> list[PageInfo]:
        infos = self._called("scan", space, [], lambda: _all(self.storage.scan(space)))
        return [self._page_info(info) for info in infos]

    def scanning(self, space: KeySpace) -> Generator[PageInfo, None, None]:
        """Yield the pages of a listing one by one, for a caller that acts between two steps."""
        for info in self._stepped("scan", space, lambda: self.storage.scan(space)):
            yield self._page_info(info)

    def spaces(self) -> list[KeySpace]:
        spaces = self._called("spaces", None, [], lambda: _all(self.storage.spaces()))
        return [self._key_space(space) for space in spaces]

    def listing_spaces(self) -> Generator[KeySpace, None, None]:
        """Yield the key spaces of a listing one by one."""
        for space in self._stepped("spaces", None, self.storage.spaces):
            yield self._key_space(space)

    def attempt(
        self, operation: str, space: KeySpace, hashes: Sequence[str], call: Callable[[], T]
    ) -> T | UnsupportedOperation:
        """Make a call that the store may refuse. Return its answer, or the refusal."""
        return self._called(operation, space, hashes, partial(_or_refusal, call))

    def close(self) -> None:
        self._called("close", None, [], self.storage.close)

    def memory(self, space: KeySpace, count: int, segments: int = 1) -> PageMemory:
        """Return memory for pages of `space`, as the SDK would pass it to this storage."""
        claims = self.storage.capabilities
        return PageMemory(
            count,
            space.stored_nbytes,
            segments=segments if claims.scatter_gather else 1,
            alignment=claims.alignment,
        )

    def violation(
        self, message: str, *, expected: str = "", got: str = "", sequence: Sequence[str] = ()
    ) -> Violation:
        """Return a violation. If no `sequence` is given, the violation has the last calls."""
        return Violation(message, expected, got, tuple(sequence or self.trace.sequence()))

    def _parts(self, items: Sequence[T], most: int | None = None) -> list[Sequence[T]]:
        """Return the batches that the SDK would make of `items`, or one empty batch for no items."""
        step = most or self.max_batch
        return [items[start : start + step] for start in range(0, max(len(items), 1), step)]

    def _answers(
        self,
        operation: str,
        space: KeySpace,
        hashes: Sequence[str],
        call: Callable[[], Any],
    ) -> list[bool]:
        answers = self._called(operation, space, hashes, call)
        if not isinstance(answers, list):
            raise self.violation(
                f"{operation} must return a list of bool",
                expected=f"a list of {len(hashes)} bool",
                got=f"{type(answers).__name__}: {_short(answers)}",
            )
        given = cast("list[object]", answers)
        strange = [one for one in given if type(one) is not bool]
        if len(given) != len(hashes) or strange:
            raise self.violation(
                f"{operation} must return one bool for each hash",
                expected=f"a list of {len(hashes)} bool",
                got=f"{len(given)} items, {_short(given)}",
            )
        return cast("list[bool]", given)

    def _called(
        self, operation: str, space: KeySpace | None, hashes: Sequence[str], call: Callable[[], T]
    ) -> T:
        where = "" if space is None else f" {space_text(space)}"
        number = self.trace.began(f"{self.label}.{operation}{where}", hashes)
        try:
            answer = call()
        except (StorageUnavailable, StorageTimeout) as error:
            self.trace.ended(number, f"raised {_error_text(error)}")
            if not self._alive():
                raise ServerGone(f"{operation}: {_error_text(error)}") from error
            raise self.violation(
                f"{operation} raised {type(error).__name__} although the store answers",
                expected=_IN_TIME if isinstance(error, StorageTimeout) else "",
                got=_error_text(error),
            ) from error
        except Exception as error:
            self.trace.ended(number, f"raised {_error_text(error)}")
            if isinstance(error, UnsupportedOperation):
                require_present(operation, self.absent)
            raise self.violation(
                f"{operation} raised {type(error).__name__}, but the contract allows no exception",
                got=_error_text(error),
            ) from error
        self.trace.ended(number, answer)
        return answer

    def _page_info(self, info: object) -> PageInfo:
        if not isinstance(info, PageInfo) or type(info.page_hash) is not str:
            raise self.violation("scan must yield PageInfo", got=_short(info))
        return info

    def _key_space(self, space: object) -> KeySpace:
        if not isinstance(space, KeySpace):
            raise self.violation("spaces must yield KeySpace", got=_short(space))
        return space

    def _stepped(
        self, operation: str, space: KeySpace | None, call: Callable[[], Iterator[T]]
    ) -> Generator[T, None, None]:
        found = self._called(operation, space, [], lambda: iter(call()))
        step = f"next of {operation}"
        try:
            while item := self._called(step, space, [], lambda: next(found, None)):
                yield item
        finally:  # this thread began the listing, and may hold its lock
            if isinstance(found, GeneratorType):
                found.close()

    def _check_guards(self, memory: PageMemory, operation: str) -> None:
        overrun = memory.overrun()
        if overrun:
            raise self.violation(
                f"{operation} wrote outside the pages that it was given (KV-004)", got=overrun
            )


def require_present(operation: str, absent: Mapping[str, str]) -> None:
    """End a check that needs an operation if the store lacks it.

    Raises:
        NotVerified: The operation is in `Subject.absent`.
    """
    name = operation.removeprefix("next of ")
    if name in absent:
        raise NotVerified(f"the store was not written for {name}: {absent[name]}")


def _all(listing: Iterator[T]) -> list[T]:
    """Return a whole listing, but only the start of one that does not seem to end."""
    return list(islice(listing, _MOST_LISTED))


def _or_refusal(call: Callable[[], T]) -> T | UnsupportedOperation:
    try:
        return call()
    except UnsupportedOperation as refusal:
        return refusal


def space_text(space: KeySpace) -> str:
    """Describe a key space in a few characters: its pool, its page size and the start of its id."""
    return f"{space.pool}/{space.stored_nbytes}B/{space.id[:6]}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
