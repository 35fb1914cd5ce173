"""How much memory this process may still take: of the machine, and of the control groups that it is in.

A container is killed for memory when its group passes its limit, however much the machine has left, and
the nearest limit may be that of a group further up. The file cache that is charged to a group is free
for the asking, as it is in the machine's own MemAvailable.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator


class Room(NamedTuple):
    """Memory that can still be taken, and what sets the limit."""

    nbytes: int
    where: str


class _Files(NamedTuple):
    """What the files of one version of control groups are called."""

    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]


# Above `memory.high` a group is slowed down until it stands still: as good as no memory.
_V2 = _Files(
    ("memory.max", "memory.high"),
    "memory.current",
    ("active_file", "inactive_file", "slab_reclaimable"),
)
_V1 = _Files(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)


def room(root: Path = Path("/")) -> Room:
    """The least room that the machine or a control group leaves; `root` is where /proc and /sys are."""
    machine = _table(root / "proc/meminfo")["MemAvailable"] << 10
    return min([Room(machine, "on this machine"), *_groups(root)], key=lambda each: each.nbytes)


def _groups(root: Path) -> Iterator[Room]:
    """The room in each group with a limit, from the process's own up to the topmost that is visible."""
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # a kernel without control groups
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield from _upwards(mount, path, _V2)
        elif "memory" in controllers.split(","):
            yield from _upwards(mount / "memory", path, _V1)


def _upwards(mount: Path, path: str, files: _Files) -> Iterator[Room]:
    """The group at `path`, and those above it.

    In a container without a namespace of its own the path is the host's. Of its groups only the mount
    itself is there then: that is the container's.
    """
    inside = PurePosixPath(path.lstrip("/"))
    if ".." in inside.parts:  # it is in a group beside the one that the mount shows
        inside = PurePosixPath()
    for group in (inside, *inside.parents):
        found = _room_of(mount / group, files)
        if found is not None:
            limit, left = found
            name = f"/{group}" if group.parts else "/"
            yield Room(left, f"in control group {name}, which is limited to {limit} bytes")


def _room_of(group: Path, files: _Files) -> tuple[int, int] | None:
    """The limit of a group, and what it leaves; None where there is no limit, or no such group."""
    limits = [limit for name in files.limits if (limit := _number(group / name)) is not None]
    usage = _number(group / files.usage)
    if not limits or usage is None:
        return None
    stat = _table(group / "memory.stat")
    cache = min(usage, sum(stat.get(name, 0) for name in files.cache))
    return min(limits), max(0, min(limits) - usage + cache)


def _number(file: Path) -> int | None:
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None  # "max": no limit


def _table(file: Path) -> dict[str, int]:
    """The first number of each line, by the word before it."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    rows = [line.replace(":", " ").split() for line in lines]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
