"""How much memory this process can still allocate, on this machine and in its control groups.

The kernel kills a container that exceeds the limit of its group, however much memory the machine has. A
parent group may have the lowest limit. File cache that is charged to a group counts as available, as in
the machine's own MemAvailable.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from hicache_storage.scalars import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterator


class MemoryLimit(NamedTuple):
    """An upper bound of what this process can still allocate."""

    nbytes: int
    where: str
    """Origin of the bound, as a phrase for error messages."""


class _Files(NamedTuple):
    """The names of the limit files in one version of control groups."""

    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]


# The kernel throttles a group above `memory.high` to a standstill, so it counts as a limit.
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


def available_memory(root: Path = Path("/")) -> MemoryLimit:
    """Return the lowest limit of the machine and the control groups; `root` contains /proc and /sys."""
    machine = _table(root / "proc/meminfo")["MemAvailable"] << 10
    return min(
        [MemoryLimit(machine, "on this machine"), *_groups(root)], key=lambda limit: limit.nbytes
    )


def _groups(root: Path) -> Iterator[MemoryLimit]:
    """Yield the limit of each group that has one, from the process's own group up to the top."""
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # the kernel has no control groups
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield from _limits_up_from(mount, path, _V2)
        elif "memory" in controllers.split(","):
            yield from _limits_up_from(mount / "memory", path, _V1)


def _limits_up_from(mount: Path, path: str, files: _Files) -> Iterator[MemoryLimit]:
    """Yield the limits of the group at `path` and of its parents.

    In a container without a cgroup namespace the path is the host's. The only group that exists below
    the mount is then the mount itself, which is the container's group.
    """
    inside = PurePosixPath(path.lstrip("/"))
    if ".." in inside.parts:  # the group lies outside the mounted one
        inside = PurePosixPath()
    for group in (inside, *inside.parents):
        usage = _limit_and_available(mount / group, files)
        if usage is not None:
            limit, available = usage
            name = f"/{group}" if group.parts else "/"
            yield MemoryLimit(
                available, f"in control group {name}, which is limited to {format_nbytes(limit)}"
            )


def _limit_and_available(group: Path, files: _Files) -> tuple[int, int] | None:
    """Return a group's limit and its available bytes; None for a group that is unlimited or missing."""
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
    """Return a dictionary with the first word of each line and the number after it."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    rows = [line.replace(":", " ").split() for line in lines]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
