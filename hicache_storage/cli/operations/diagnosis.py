"""Check a store in the way in which an engine would use it, and check this machine."""

from __future__ import annotations

import enum
import errno
import os
import re
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_storage import native
from hicache_storage.cli.operations.batches import listed
from hicache_storage.cli.operations.probe import PROBE_MODEL
from hicache_storage.cli.operations.proofs import WRONG, Proof
from hicache_storage.cli.sizes import counted, format_nbytes
from hicache_storage.cli.stores import excesses_of
from hicache_storage.composition.parts import all_parts, undivided, undivided_configs
from hicache_storage.composition.storage import NO_ANSWER
from hicache_storage.durations import format_age, format_skew
from hicache_storage.errors import (
    HiCacheError,
    StorageTimeout,
    StorageUnavailable,
    advice_about,
    shown,
)
from hicache_storage.page_store import Verdict
from hicache_storage.prefetch_policy import PrefetchPolicy
from hicache_storage.scalars import expand_home
from hicache_storage.storage import Retention, UnreadableKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from hicache_storage.cli.operations.answering import Answering
    from hicache_storage.cli.operations.probe import Measured
    from hicache_storage.config import StorageChoice
    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import Diagnosis, HiCacheStorage, UnreadableSpace

_ENGINES = ("sglang", "vllm", "lmcache")
_SLOW_ROUND_TRIP_S = 0.02
_CLOCK_SKEW_S = 5.0
_TIMES_S = 2.0
"""How long to ask for the times of pages in each key space."""
_MOST_NAMED = 4
_SAYS_WHAT_TO_DO = re.compile("again|move that file|when an engine opens")
_LEAST_FREE_SHARE = 0.05
_REQUESTS_TOKENS = (1024, 8192, 32_768, 131_072)
_VOLATILE = frozenset({"tmpfs", "ramfs", "overlay"})

_UNREADABLE_ADVICE = {
    UnreadableKind.OTHER_KEY: "if they are yours, add the keys that sealed them to the config;"
    " `hicache gc --unreadable` removes them",
    UnreadableKind.OTHER_VERSION: "use the version of the engines that wrote them; if there are none,"
    " `hicache gc --unreadable` removes them",
    UnreadableKind.NOT_READ: "let this user read the manifests, or check the store's disk and log",
    UnreadableKind.DAMAGED: "an engine that opens them may write their manifests again; `hicache gc"
    " --unreadable` removes them with all their pages",
}
_REMOVAL_ADVICE = (
    f"when the store answers, `hicache gc --model {PROBE_MODEL} --yes` removes what is left of them"
)
_ADVICE = {
    "write": "let this user write, make room, or use smaller pages; until then engines store nothing",
    "read": "let this user read, and check the store's log; until then every page is a miss",
    "look-up": "check the store's log; until then every page is a miss",
    "delete": "let this user delete; until then wrong pages cannot be replaced",
}


_WRONG_PAGES_ADVICE = (
    "check disks, memory, and what else writes there; `hicache verify --delete-wrong` deletes such"
    " pages, and engines write them again"
)
_UNKNOWN_KEY_ADVICE = (
    "if you still need them, add the keys that sealed them to the config; engines replace them"
)
_READ_ONLY_ADVICE = (
    "mount it for writing, because engines write; ls, verify and copy can read it as it is"
)
_RIGHTS_ADVICE = "let this user read and write there, or run as the user of the engines"
_DOWN_ADVICE = "start the store, or see why it does not answer; until then engines run without L3"
_SLOW_ADVICE = "the store is slow: raise timeout_s in its config, or check its load and the network"


class Status(enum.Enum):
    """How serious a check's result is."""

    OK = "ok"
    NOTE = "note"
    """An operator should know about it, but it may be intended."""
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    topic: str
    status: Status
    fact: str
    advice: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the fields."""
        return {**asdict(self), "status": self.status.value}

    def about(self, part: str) -> Check:
        """Return the check as that of a part of the store, or as it is if the part has no name."""
        if not part:
            return self
        advice = self.advice.partition("; until then engines")[0]  # they still have the other parts
        return replace(self, topic=f"{part}: {self.topic}", advice=advice)


def machine_checks() -> Iterator[Check]:
    """Yield the checks that need no store."""
    if native.implementation == "compiled":
        yield Check("data plane", Status.OK, "compiled")
    else:
        yield Check(
            "data plane",
            Status.NOTE,
            f"the Python reference: {native.reason}",
            "use the compiled module, because it moves pages without the interpreter lock",
        )
    found = [f"{name} {version}" for name in _ENGINES if (version := _version(name))]
    yield Check("engines", Status.OK, ", ".join(found) or "none is installed here")


def part_checks(asked: Answering) -> Iterator[Check]:
    """Yield for each store of a composition whether it answers."""
    for name in asked.parts:
        yield Check("open", Status.OK, "it answers").about(name)
    for name, error in asked.failed.items():
        yield opening_problem(error).about(name)


def path_checks(choice: StorageChoice, storage: HiCacheStorage) -> Iterator[Check]:
    """Yield the checks of the file system, for each store that has a path."""
    parts, roots = undivided(storage), dict[str, Path]()
    for name, (_, fields) in undivided_configs(choice.backend, choice.config).items():
        path = fields.get("path")
        if isinstance(path, str) and name in parts:
            root = Path(expand_home(path)).resolve()
            with suppress(FileNotFoundError, StorageUnavailable):  # `part_checks` says why
                for check in _path_checks(root, parts[name]):
                    yield check.about(name)
                roots[name] = root
    yield from _shared_mounts(roots, parts)


def _shared_mounts(
    roots: Mapping[str, Path], parts: Mapping[str, HiCacheStorage]
) -> Iterator[Check]:
    """Yield a check of each file system that has several parts. So do disks that are not mounted."""
    on: dict[int, list[str]] = {}
    for name, root in roots.items():
        on.setdefault(root.stat().st_dev, []).append(name)
    for names in on.values():
        if len(names) < 2:
            continue
        kind, mount = mount_of(roots[names[0]], Path("/proc/self/mountinfo"))
        system = os.statvfs(roots[names[0]])
        total = system.f_blocks * system.f_frsize
        wanted = sum(parts[name].stats().capacity_nbytes or 0 for name in names)
        fact = f"{', '.join(names)} are on one file system, {kind} on {mount}"
        advice = "if each of them has a disk of its own, mount it"
        if wanted > total:
            sizes = f"{format_nbytes(wanted)} for its {format_nbytes(total)}"
            advice = f"{advice}; otherwise lower capacity_nbytes until they fit together"
            yield Check("mounts", Status.PROBLEM, f"{fact}: capacities of {sizes}", advice)
        else:
            yield Check("mounts", Status.NOTE, fact, advice)


def _path_checks(root: Path, storage: HiCacheStorage) -> Iterator[Check]:
    kind, mount = mount_of(root, Path("/proc/self/mountinfo"))
    status = Status.NOTE if kind in _VOLATILE else Status.OK
    advice = "pages are lost when this mount ends: use a disk or a shared file system"
    system = os.statvfs(root)
    if system.f_flag & os.ST_RDONLY:
        yield Check("mount", Status.PROBLEM, f"{kind} on {mount}, read-only", _READ_ONLY_ADVICE)
    else:
        yield Check("mount", status, f"{kind} on {mount}", advice if status is Status.NOTE else "")
        for place in (root, root / "spaces"):
            if place.is_dir() and not os.access(place, os.W_OK | os.X_OK, effective_ids=True):
                fact = f"this user may not write to {shown(str(place))}"
                yield Check("rights", Status.PROBLEM, fact, _RIGHTS_ADVICE)
                break
    free, total = system.f_bavail * system.f_frsize, system.f_blocks * system.f_frsize
    fact = f"{format_nbytes(free)} of {format_nbytes(total)}"
    capacity = storage.stats().capacity_nbytes
    if capacity is not None and capacity > total:
        yield Check(
            "free space",
            Status.PROBLEM,
            f"{fact}, but capacity_nbytes is {format_nbytes(capacity)}",
            "lower capacity_nbytes below the size of the file system",
        )
    elif free < total * _LEAST_FREE_SHARE:
        how = "set" if capacity is None else "lower"
        yield Check("free space", Status.PROBLEM, fact, f"free space, or {how} capacity_nbytes")
    else:
        yield Check("free space", Status.OK, fact)


def store_checks(asked: Answering, said: Sequence[Diagnosis]) -> Iterator[Check]:
    """Yield the checks of what the store says about itself (`said`), and of its key spaces."""
    storage = asked.whole
    is_listed = storage.capabilities.enumerable
    yield Check(
        "listing",
        Status.OK if is_listed else Status.NOTE,
        "the store lists its pages" if is_listed else "the store cannot list its pages",
        "" if is_listed else "ls, verify, gc and copy from it do not work",
    )
    excesses, parts = excesses_of(storage), all_parts(storage)
    for one in said:
        name, _, word = one.topic.rpartition(": ")
        if word == NO_ANSWER and name in asked.failed:  # `part_checks` says it
            continue
        keeps = parts.get(name, storage).capabilities.retention is Retention.UNTIL_DELETED
        weight = Status.NOTE if one.advice or one.is_full else Status.OK
        if one.is_full and one.advice and (keeps or name in excesses):
            weight = Status.PROBLEM
        yield Check(one.topic, weight, one.fact, one.advice)
    for name, excess in excesses.items():
        advice = (
            "use the capacity_nbytes of the engines; an engine with this config would evict the"
            " rest"
        )
        check = Check("capacity", Status.PROBLEM, excess, advice).about(name)
        if not any(one.topic == check.topic for one in said):
            yield check
    for name, part in asked.readable.items() if is_listed else ():
        spaces = [*part.spaces()]
        for check in _key_spaces(spaces, [*part.unreadable_spaces()]):
            yield check.about(name)
        for check in _times(part, spaces):
            yield check.about(name)


def _key_spaces(
    spaces: Sequence[KeySpace], unreadable: Sequence[UnreadableSpace]
) -> Iterator[Check]:
    if not unreadable:
        fact = f"{len(spaces):,}" if spaces else "the store is empty"
        yield Check("key spaces", Status.OK, fact)
    total = len(spaces) + len(unreadable)
    for kind, advice in _UNREADABLE_ADVICE.items():
        those = [f"{one.space_id}: {one.reason}" for one in unreadable if one.kind is kind]
        named, left = those[:_MOST_NAMED], len(those) - _MOST_NAMED
        if those:
            more = [f"{left:,} more"] if left > 0 else []
            fact = f"{len(those):,} of {total:,} cannot be read: {'; '.join([*named, *more])}"
            yield Check("key spaces", Status.PROBLEM, fact, advice)


def _times(storage: HiCacheStorage, spaces: Iterable[KeySpace]) -> Iterator[Check]:
    """Check the times of some pages. Nobody knows when a page from the future was used."""
    looked = ahead = 0
    most_s, end_s = 0.0, time.monotonic() + _TIMES_S
    for space in spaces:
        for batch in listed(storage, space):
            found = storage.page_times(space, [info.page_hash for info in batch])
            latest = [max(one.written_at_s or 0.0, one.used_at_s or 0.0) for one in found]
            now_s = time.time()
            looked += sum(at_s > 0 for at_s in latest)
            ahead += sum(at_s > now_s + _CLOCK_SKEW_S for at_s in latest)
            most_s = max(most_s, *(at_s - now_s for at_s in latest))
            if not any(latest) or time.monotonic() > end_s:
                break
    if ahead:
        yield Check(
            "times",
            Status.PROBLEM,
            f"{ahead:,} of {counted(looked, 'page')}: times in the future, by up to"
            f" {format_age(most_s)}",
            "synchronize the clocks of all writers with NTP. `gc` keeps the key spaces of these pages;"
            " file and hf3fs evict a page that is more than 5 minutes ahead before others, unless it"
            " is read again",
        )


def no_trial(reason: str) -> Check:
    """Return the check for a trial that was not written."""
    return Check("write", Status.NOTE, f"not tried: {reason}")


def proof_checks(measured: Measured | None, choice: StorageChoice) -> Iterator[Check]:
    """Yield the checks of existing pages, which replace the trial if the doctor must not write."""
    if measured is None:
        yield Check("read", Status.NOTE, "not tried: there is no page")
    else:
        yield from probe_checks(measured, choice)


def part_proof_checks(name: str, measured: Measured | None) -> Iterator[Check]:
    """Yield the checks of what was measured with one store of a composition."""
    if measured is None:
        yield Check("read", Status.NOTE, "not tried: there is no page").about(name)
        return
    speeds = {"write": measured.write_nbytes_s, "read": measured.read_nbytes_s}
    words = [f"{step} {format_nbytes(speed)}/s" for step, speed in speeds.items() if speed]
    if measured.round_trip_s is not None:
        words.append(f"look-up {measured.round_trip_s * 1000:.2f} ms")
    for check in _failures(measured):
        yield check.about(name)
    if words and measured.is_reduced:
        words.insert(0, _pages_of(measured))
    if words:
        yield Check("speed", Status.OK, ", ".join(words)).about(name)
    if measured.clock_skew_s is not None and abs(measured.clock_skew_s) >= _CLOCK_SKEW_S:
        yield _clock(measured.clock_skew_s).about(name)


def opening_problem(error: HiCacheError) -> Check:
    """Return the check for a store that does not open."""
    advice = "start the store, or correct its address; until then engines run without L3"
    known, cause = advice_about(error), error.__cause__
    while isinstance(cause, HiCacheError):  # a composition names the store that failed
        cause = cause.__cause__
    if known is not None:
        advice = known
    elif isinstance(cause, OSError) and cause.errno == errno.EROFS:
        advice = _READ_ONLY_ADVICE
    elif os.strerror(errno.EACCES) in str(error) or (
        isinstance(cause, OSError) and cause.errno in {errno.EACCES, errno.EPERM}
    ):
        advice = _RIGHTS_ADVICE
    elif "is full" in str(error) or (
        isinstance(cause, OSError) and cause.errno in {errno.ENOSPC, errno.EDQUOT}
    ):
        advice = "make room"
    elif isinstance(error, StorageTimeout):
        advice = "check the store's load, or raise timeout_s"
    elif _SAYS_WHAT_TO_DO.search(str(error)):
        advice = ""
    return Check("open", Status.PROBLEM, str(error), advice)


def probe_checks(measured: Measured, choice: StorageChoice) -> Iterator[Check]:
    """Yield the checks of what was measured with the doctor's own pages."""
    yield from _failures(measured)
    for step, nbytes_per_s in (
        ("write", measured.write_nbytes_s),
        ("read", measured.read_nbytes_s),
    ):
        if nbytes_per_s is not None:
            fact = f"{_pages_of(measured)}: {format_nbytes(nbytes_per_s)}/s"
            yield Check(step, Status.OK, fact)
    if measured.round_trip_s is not None:
        yield _round_trip(measured.round_trip_s)
    if measured.clock_skew_s is not None:
        yield _clock(measured.clock_skew_s)
    policy = choice.controller.prefetch_policy
    is_usual = not measured.is_reduced or measured.pages > 1  # one small page says little of speed
    if measured.read_nbytes_s is not None and policy is PrefetchPolicy.TIMEOUT and is_usual:
        yield _prefetch(measured, choice)


def _pages_of(measured: Measured) -> str:
    fact = f"{counted(measured.pages, 'page')} of {format_nbytes(measured.page_nbytes)}"
    return f"{fact}, as much as fits without an eviction" if measured.is_reduced else fact


def _failures(measured: Measured) -> Iterator[Check]:
    for step, error in measured.failures:
        advice = _ADVICE[step]
        if Verdict.TIMEOUT.value in error:
            advice = _SLOW_ADVICE
        elif any(proof.value in error for proof in WRONG):
            advice = _WRONG_PAGES_ADVICE
        elif Proof.UNKNOWN_KEY.value in error:
            advice = _UNKNOWN_KEY_ADVICE
        elif measured.is_down:
            advice = _REMOVAL_ADVICE if step == "delete" else _DOWN_ADVICE
        yield Check(step, Status.PROBLEM, error, advice)
    if measured.left_space:
        advice = f"`hicache gc --model {PROBE_MODEL} --yes` removes it, by a user who may do that"
        yield Check("key space", Status.NOTE, measured.left_space, advice)
    if measured.is_late:
        yield Check(
            "late pages",
            Status.NOTE,
            f"the store may still carry out writes of model {PROBE_MODEL} that it did not answer"
            " in time",
            _REMOVAL_ADVICE,
        )


def _round_trip(seconds: float) -> Check:
    fact = f"{seconds * 1000:.2f} ms to look a page up (median)"
    if seconds < _SLOW_ROUND_TRIP_S:
        return Check("round trip", Status.OK, fact)
    return Check("round trip", Status.PROBLEM, fact, "move the store closer, or check its load")


def _clock(skew_s: float) -> Check:
    fact = f"the store's clock differs from this machine's by {format_skew(skew_s)}"
    if abs(skew_s) < _CLOCK_SKEW_S:
        return Check("clock", Status.OK, fact)
    return Check("clock", Status.PROBLEM, fact, "synchronize both clocks with NTP")


def _prefetch(measured: Measured, choice: StorageChoice) -> Check:
    """Compare SGLang's timeouts with the time that the measured reads need."""
    token_nbytes = measured.page_nbytes / measured.page_tokens
    late: list[str] = []
    for tokens in _REQUESTS_TOKENS:
        limit_s = choice.controller.max_wait_s(1, tokens) or 0.0
        needed_s = tokens * token_nbytes / (measured.read_nbytes_s or 1.0)
        if needed_s > limit_s:
            late.append(
                f"{tokens:,} tokens need {needed_s:.1f} s, but may take only {limit_s:.1f} s"
            )
    if not late:
        return Check("prefetch", Status.OK, "the timeouts are long enough for up to 131,072 tokens")
    return Check(
        "prefetch",
        Status.PROBLEM,
        "; ".join(late),
        "raise prefetch_timeout_per_ki_token, or use a faster store",
    )


def mount_of(path: Path, mounts: Path) -> tuple[str, str]:
    """Return the type of the file system that `path` is on, and where it is mounted."""
    best = ("unknown", "/")
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return best
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(" "), after.split(" ")
        if len(fields) < 5 or not kinds:
            continue
        mount = fields[4].replace("\\040", " ")
        if path.is_relative_to(mount) and len(mount) >= len(best[1]):
            best = (kinds[0], mount)
    return best


def worst(checks: Sequence[Check]) -> Status:
    """Return PROBLEM if any check found a problem, otherwise NOTE or OK."""
    order = [Status.OK, Status.NOTE, Status.PROBLEM]
    return max((check.status for check in checks), key=order.index, default=Status.OK)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
