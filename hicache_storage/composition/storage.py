"""The part of a composed storage that does not depend on which of its stores holds a page.

A subclass implements the calls of engines, `clear` and `remove_space`. The calls of operators (listings,
removals) go to each store without its breaker, and an error names the store: "nothing is there" and "I
could not look" are different answers.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING, Any, ClassVar, Self

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.composition.claims import STRONGEST, weakest
from hicache_storage.composition.member import Member, noting
from hicache_storage.composition.parts import place_of, stats_of
from hicache_storage.composition.unopened import AbsentStorage, UnopenedStorage, is_absent
from hicache_storage.errors import (
    BackendNotInstalled,
    ConfigError,
    HiCacheError,
    NoSuchStore,
    StorageTimeout,
    StorageUnavailable,
    UnknownBackend,
    shown,
)
from hicache_storage.registry import resolve
from hicache_storage.storage import (
    Capabilities,
    Diagnosis,
    HiCacheStorage,
    PageTimes,
    StorageStats,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

    from hicache_storage.composition.labels import Labels
    from hicache_storage.composition.member import PendingCall
    from hicache_storage.composition.settings import LimitSettings, MemberSettings
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import HostBuffer
    from hicache_storage.storage import PageFault, PageInfo, UnreadableSpace


_UNAVAILABLE = (StorageUnavailable, StorageTimeout)
ABSENT = "absent"
"""The state of a member that did not open with the others, until it does."""
NO_ANSWER = "state"
"""The topic of the diagnosis of a member that does not answer, behind its name."""


class ComposedStorage(HiCacheStorage):
    """A storage that consists of other storages, its members. Thread-safe."""

    capabilities: ClassVar[Capabilities] = STRONGEST
    """The widest claims. An instance claims what its members allow."""
    backend: ClassVar[str]
    settings_class: ClassVar[type[LimitSettings]]
    field: ClassVar[str]
    """The field of the config with the members."""
    kind: ClassVar[str]
    """What a member is called in messages."""

    def __init__(
        self,
        members: Mapping[str, HiCacheStorage],
        limits: LimitSettings,
        *,
        read_only: bool,
    ) -> None:
        """Take over open storages by name, in order."""
        self._limits = limits
        self._read_only = read_only
        claims = self._claims([storage.capabilities for storage in members.values()])
        vars(self)["capabilities"] = claims
        self._members = [
            Member(f"{self.kind} {name!r}", name, storage, limits, claims.parallelism)
            for name, storage in members.items()
        ]
        vars(self)["usable_after_fork"] = all(
            member.storage.usable_after_fork for member in self._members
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls._open(config, read_only=False)

    @classmethod
    def open_read_only(cls, config: Mapping[str, Any]) -> Self:
        return cls._open(config, read_only=True)

    @classmethod
    def _open(cls, config: Mapping[str, Any], *, read_only: bool) -> Self:
        settings = cls.settings_class.parse(cls.backend, config)
        opening = Opening(cls, settings, read_only=read_only)
        return cls(opening.run(), settings, read_only=read_only)

    @classmethod
    def would_create(cls, config: Mapping[str, Any]) -> str | None:
        """Return the places where the members would create new, empty stores, or None if one exists."""
        members: Sequence[MemberSettings] = getattr(
            cls.settings_class.parse(cls.backend, config), cls.field
        )
        places: list[str] = []
        for each in members:
            with _naming(f"{cls.backend}: {cls.field}.{each.name}"):
                storage_class, fields = resolve(each.backend, each.config)
                place = storage_class.would_create(fields)
            if place is None:
                return None
            places.append(place)
        return " and ".join(places)

    @classmethod
    def would_claim(cls, config: Mapping[str, Any]) -> Capabilities:
        members: Sequence[MemberSettings] = getattr(
            cls.settings_class.parse(cls.backend, config), cls.field
        )
        resolved = [resolve(each.backend, each.config) for each in members]
        return cls._claims([each.would_claim(fields) for each, fields in resolved])

    @staticmethod
    def _claims(members: Sequence[Capabilities]) -> Capabilities:
        """Return what the composition claims, given what its members claim."""
        return weakest(members)

    def parts(self) -> Mapping[str, HiCacheStorage]:
        """Return the members by name."""
        self.ensure_open()
        return {member.name: member.storage for member in self._members}

    def open_space(self, space: KeySpace) -> None:
        """Open `space` in each member, at the same time. One that fails opens it before its first set.

        Raises:
            StorageUnavailable, StorageTimeout: No member opened it in time.
        """
        super().open_space(space)
        errors: list[Exception] = []
        calls: list[PendingCall[None]] = []
        for member in self._members:
            with noting(errors, _UNAVAILABLE):
                call = member.begin_open(space)
                calls += [call] if call else []
        for call in calls:
            with noting(errors, _UNAVAILABLE):
                call.result()
        if len(errors) == len(self._members):
            raise errors[0]

    # --- listings ----------------------------------------------------------------------------------

    def spaces(self) -> Iterator[KeySpace]:
        """Yield each key space that a member holds, once."""
        self.ensure_open()
        return self._spaces()

    def _spaces(self) -> Iterator[KeySpace]:
        seen: set[KeySpace] = set()
        for member in self._members:
            with self._named(member):
                for space in member.storage.spaces():
                    if space not in seen:
                        seen.add(space)
                        yield space

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        """Yield each page that a member holds, once. The names of those seen take memory meanwhile."""
        self.ensure_open()
        return self._scan(space)

    def _scan(self, space: KeySpace) -> Iterator[PageInfo]:
        seen: set[bytes] = set()
        for member in self._members:
            with self._named(member):
                for info in member.storage.scan(space):
                    name = info.page_hash.encode()
                    if name not in seen:
                        seen.add(name)
                        yield info

    def faults(self, space: KeySpace, hashes: Sequence[str] | None = None) -> Iterator[PageFault]:
        """Yield the damaged objects of each member, with the member's name in `detail`."""
        self.ensure_open()
        return self._faults(space, hashes)

    def _faults(self, space: KeySpace, hashes: Sequence[str] | None) -> Iterator[PageFault]:
        for member in self._members:
            with self._named(member):
                for fault in member.storage.faults(space, hashes):
                    yield replace(fault, detail=f"{member.label}: {fault.detail}".rstrip(": "))

    def unreadable_spaces(self) -> Iterator[UnreadableSpace]:
        self.ensure_open()
        return self._unreadable_spaces()

    def _unreadable_spaces(self) -> Iterator[UnreadableSpace]:
        for member in self._members:
            with self._named(member):
                for one in member.storage.unreadable_spaces():
                    yield replace(one, reason=f"{member.label}: {one.reason}")

    def page_times(self, space: KeySpace, hashes: Sequence[str]) -> list[PageTimes]:
        """Return the latest times that a member recorded for each page.

        A time is unknown if a shared member has the page and does not record it, because other hosts use
        that copy. The last use is also unknown if the first member that has the page records no uses.
        """
        self.ensure_open()
        found: list[list[PageTimes]] = []
        used, unknown_use, unknown_write = set[str](), set[str](), set[str]()
        for member in self._members:
            with self._named(member):
                found.append(member.storage.page_times(space, hashes))
                times = dict(zip(hashes, found[-1], strict=True))
                is_shared = member.storage.capabilities.shared
                silent = [
                    one
                    for one, each in times.items()
                    if each.used_at_s is None and (is_shared or one not in used)
                ]
                if silent:
                    silent = [*compress(silent, member.storage.batch_exists(space, silent))]
                unknown_use.update(silent)
                if is_shared:
                    unknown_write.update(one for one in silent if times[one].written_at_s is None)
                used.update(one for one, each in times.items() if each.used_at_s is not None)
        latest = [_latest(times) for times in zip(*found, strict=True)]
        return [
            PageTimes(written_at_s=None if one in unknown_write else times.written_at_s)
            if one in unknown_use
            else times
            for one, times in zip(hashes, latest, strict=True)
        ]

    # --- the rest ------------------------------------------------------------------------------------

    def diagnose(self) -> list[Diagnosis]:
        """Return the diagnoses of each member, with its name, and the members that are not asked now."""
        self.ensure_open()
        found: list[Diagnosis] = []
        for member in self._members:
            if member.state != "closed" and not is_absent(member.storage):
                found.append(
                    Diagnosis(
                        member.name,
                        "its last calls failed, so it is not asked for a while",
                        "look for the reason in the log",
                    )
                )
            try:
                diagnoses = member.storage.diagnose()
            except HiCacheError as error:
                diagnoses = [
                    Diagnosis(NO_ANSWER, f"it does not answer: {error}", "repair this store")
                ]
            found += [
                replace(each, topic=f"{member.name}{_joint(member, each.topic)}{each.topic}")
                for each in diagnoses
            ]
        return found

    def stats(self) -> StorageStats:
        """Return the sums of the members' figures, and their counters as `NAME.COUNTER`.

        A member that fails reports no figures.
        """
        self.ensure_open()
        found = [(member, stats_of(member.storage)) for member in self._members]
        return StorageStats(
            nbytes=_sum([stats.nbytes for _, stats in found]),
            capacity_nbytes=_sum([stats.capacity_nbytes for _, stats in found]),
            counters={
                f"{member.name}.{name}": count
                for member, stats in found
                for name, count in {**stats.counters, **member.counters.snapshot()}.items()
            },
            part_states={
                f"{member.name}{below}": state
                for member, stats in found
                for below, state in {
                    "": ABSENT if is_absent(member.storage) else member.state,
                    **{f"/{name}": state for name, state in stats.part_states.items()},
                }.items()
            },
        )

    def register_buffer(self, buffer: HostBuffer) -> None:
        self.ensure_open()
        for member in self._members:
            member.storage.register_buffer(buffer)

    def unregister_buffer(self, buffer: HostBuffer) -> None:
        self.ensure_open()
        for member in self._members:
            member.storage.unregister_buffer(buffer)

    def close(self) -> None:
        super().close()  # first, so that calls under way say that the storage was closed
        deadline = Deadline(self._limits.timeout_s)
        with ExitStack() as stack:
            for member in self._members:
                stack.callback(member.close, deadline)

    # --- parts -----------------------------------------------------------------------------------

    def _require_an_answer(self, errors: Sequence[Exception], asked: int) -> None:
        """Raise the first of the errors if none of the `asked` members answered."""
        if errors:
            self.ensure_open()
            if len(errors) >= asked:
                raise errors[0]

    @property
    def _widest_capabilities(self) -> Capabilities:
        return self.capabilities

    def _clear_members(self, call: Callable[[HiCacheStorage], int]) -> list[int]:
        """Remove pages from each member, the last one first, whatever happens to the others.

        Raises:
            StorageUnavailable, StorageTimeout: The first error of a member, with its name.
        """
        removed: list[int] = []
        errors: list[HiCacheError] = []
        for member in reversed(self._members):
            try:
                with self._named(member):
                    removed.append(call(member.storage))
            except HiCacheError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return removed

    @contextmanager
    def _named(self, member: Member) -> Generator[None]:
        """Name the member in errors about its availability."""
        try:
            yield
        except (StorageUnavailable, StorageTimeout) as error:
            raise type(error)(f"{member.label}: {error}") from error


class Opening:
    """Opens the members of a composition."""

    def __init__(
        self,
        composition: type[ComposedStorage],
        settings: LimitSettings,
        *,
        read_only: bool,
        labels: Labels | None = None,
    ) -> None:
        """Find the class of each member. With `labels`, read and write those of the members.

        Raises:
            ConfigError, UnknownBackend, BackendNotInstalled: As in `open_storage`.
        """
        self._where = f"{composition.backend}: {composition.field}"
        self._kind = composition.kind
        self._limits = settings
        self._read_only = read_only
        self._labels = labels
        self._members: dict[str, MemberSettings] = {
            each.name: each for each in getattr(settings, composition.field)
        }
        self._resolved: dict[str, tuple[type[HiCacheStorage], dict[str, Any]]] = {}
        places: dict[str, tuple[str, object]] = {}
        for name, each in self._members.items():  # all of them before one is opened or made
            with _naming(f"{self._where}.{name}"):
                self._resolved[name] = storage_class, fields = resolve(each.backend, each.config)
                place = each.backend, place_of(fields)
                for other, known in places.items():
                    if known == place and storage_class.capabilities.shared:
                        raise ConfigError(f"this is the same store as {other!r}: name another one")
                places[name] = place

    def run(self) -> dict[str, HiCacheStorage]:
        """Open the storages in order. If the composition cannot be opened, close them.

        A storage that can end its calls in time gets `timeout_s`, unless it has its own. One that does
        not answer is absent. With `read_only`, it is never tried again, and none is made.

        Raises:
            ConfigError, StorageUnavailable, StorageTimeout: As in `from_config`, if no member answers or
                a required one does not. The message names the member.
        """
        opened: dict[str, HiCacheStorage] = {}
        errors: dict[str, StorageUnavailable | StorageTimeout] = {}
        labels = self._labels
        with ExitStack() as stack:

            def open_all(names: Iterable[str], open_one: Callable[[str], HiCacheStorage]) -> None:
                for name in names:
                    with _naming(f"{self._where}.{name}"):
                        try:
                            opened[name] = open_one(name)
                        except _UNAVAILABLE as error:
                            errors[name] = self._may_be_absent(name, error)
                        else:
                            stack.callback(opened[name].close)

            missing = [name for name in self._members if labels and self._missing_place(name)]
            open_all([name for name in self._members if name not in missing], self._open)
            if labels is not None:
                for name, error in labels.read(opened).items():
                    opened.pop(name).close()
                    with _naming(f"{self._where}.{name}"):
                        errors[name] = self._may_be_absent(name, error)
            open_all(missing, self._open_missing)
            if not opened and not self._read_only:
                name, first = next(iter(errors.items()))
                with _naming(f"{self._where}.{name}"):
                    raise first
            if labels is not None and not self._read_only:
                labels.write(opened)
            opened |= {name: self._stand_in(name, reason) for name, reason in errors.items()}
            stack.pop_all()
        return {name: opened[name] for name in self._members}

    def _may_be_absent(
        self, name: str, error: StorageUnavailable | StorageTimeout
    ) -> StorageUnavailable | StorageTimeout:
        """Return the reason why a member is absent, or raise it if the member is required."""
        if self._members[name].required and not self._read_only:
            raise error
        return error

    def _missing_place(self, name: str) -> str | None:
        storage_class, fields = self._resolved[name]
        with _naming(f"{self._where}.{name}"):
            return storage_class.would_create(fields)

    def _open_missing(self, name: str) -> HiCacheStorage:
        """Open a store that was missing. Make none in the place of one that the labels name."""
        place = self._missing_place(name)
        if place is not None and self._labels is not None and self._labels.is_unmounted(name):
            raise _no_store(
                place, f"mount it; if its disk is new, make the directory {place}/spaces there"
            )
        with ExitStack() as stack:
            opened = stack.enter_context(self._open(name))
            if self._labels is not None:  # it may have been mounted only now
                self._labels.check(name, opened)
            stack.pop_all()
        return opened

    def _open_again(self, name: str) -> HiCacheStorage:
        opened = self._open_missing(name)
        if self._labels is not None:
            self._labels.write({name: opened})
        return opened

    def _open(self, name: str) -> HiCacheStorage:
        storage_class, fields = self._resolved[name]
        if self._read_only and (place := storage_class.would_create(fields)) is not None:
            raise _no_store(
                place,
                "mount it, or correct its path; if it is new, the next engine makes a store there",
            )
        opening = storage_class.open_read_only if self._read_only else storage_class.from_config
        try:
            return _limited(opening, storage_class, fields, self._limits.timeout_s)
        except ConfigError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            # The system refuses the place: a disk that is broken or not mounted.
            raise StorageUnavailable(str(error), advice=error.advice) from error.__cause__

    def _stand_in(self, name: str, error: StorageUnavailable | StorageTimeout) -> HiCacheStorage:
        storage_class, fields = self._resolved[name]
        claims = storage_class.would_claim(fields)
        if self._read_only:
            return UnopenedStorage(error, claims)
        return AbsentStorage(
            f"{self._kind} {name!r}",
            error,
            claims,
            lambda: self._open_again(name),
            self._limits.breaker_cooldown_s,
            usable_after_fork=storage_class.usable_after_fork,
        )


def _no_store(place: str, advice: str) -> StorageUnavailable:
    error = StorageUnavailable(f"there is no store at {shown(place)}", advice=advice)
    error.__cause__ = NoSuchStore(shown(place))
    return error


def _limited(
    opening: Callable[[Mapping[str, Any]], HiCacheStorage],
    storage_class: type[HiCacheStorage],
    fields: Mapping[str, Any],
    timeout_s: float,
) -> HiCacheStorage:
    """Open a storage with this time limit, or with its own if it has one or takes none."""
    if storage_class.capabilities.bounded and "timeout_s" not in fields:
        with suppress(ConfigError):  # another field may be wrong: then the next opening says so
            return opening({**fields, "timeout_s": timeout_s})
    return opening(fields)


@contextmanager
def _naming(where: str) -> Generator[None]:
    """Begin the message of an error with the member that it is about."""
    try:
        yield
    except UnknownBackend as error:
        place = f"{where}: {error.where}" if error.where else where
        raise UnknownBackend(error.name, error.choices, place) from None
    except (ConfigError, BackendNotInstalled) as error:
        raise type(error)(f"{where}: {error}") from error.__cause__
    except (StorageUnavailable, StorageTimeout) as error:
        raise type(error)(f"{where}: {error}") from error


def _joint(member: Member, topic: str) -> str:
    """Return what stands between a member's name and a topic of its diagnoses: `nvme/a: capacity`."""
    part = topic.partition(": ")[0].partition("/")[0]
    return "/" if part in member.storage.parts() else ": "


def _latest(times: Sequence[PageTimes]) -> PageTimes:
    """Return the last write and the last use. A copy written after it was used is a use, too.

    Uses that a member may not have recorded count until the latest moment at which one may have been.
    """
    written = [each.written_at_s for each in times if each.written_at_s is not None]
    used = [(each.used_at_s, each.used_within_s) for each in times if each.used_at_s is not None]
    written_at_s = max(written, default=None)
    if not used:
        return PageTimes(written_at_s=written_at_s)
    used_at_s = max([*written, *(at_s for at_s, _ in used)])
    until_s = max([used_at_s, *(at_s + within_s for at_s, within_s in used)])
    return PageTimes(
        written_at_s=written_at_s, used_at_s=used_at_s, used_within_s=until_s - used_at_s
    )


def _sum(figures: Sequence[int | None]) -> int | None:
    known = [figure for figure in figures if figure is not None]
    return sum(known) if len(known) == len(figures) else None
