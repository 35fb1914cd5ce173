"""The part of a model's KV that each rank holds, the rank that writes it, and the grid of a fleet.

The module is arithmetic only. Ranks are numbered as in SGLang, `rank = pp_rank * tp_size +
tp_rank`. A stage has a range of layers, and each rank of a stage has a range of KV heads. If there
are fewer heads than ranks, or none (MLA), several ranks hold the same layers and heads, and the
first of these ranks writes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from hicache_storage.errors import ConfigError
from hicache_storage.host_pool.tiles import Tile
from hicache_storage.keys import Shard
from hicache_storage.scalars import check_integer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# The sizes that are tried for an error message, which lists the sizes that fit.
_SIZES = range(1, 65)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The layers and heads of a pool in the whole model.

    Raises:
        ConfigError: A number is out of range.
    """

    layers: int
    heads: int | None = None
    """The KV heads, or None if every rank holds the same bytes (MLA)."""
    stage_layers: tuple[int, ...] | None = None
    """The layers of each pipeline stage, if they are not split evenly. A stage may have none: a draft
    of one layer on the last of two stages has (0, 1)."""

    def __post_init__(self) -> None:
        _check_sizes(self, "layers", "heads")
        split = self.stage_layers
        if split is None:
            return
        for layers in split:
            _check_size("stage_layers", layers, least=0)
        if sum(split) != self.layers:
            raise ConfigError(f"stage_layers {split} must add up to {self.layers} layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The part of a pool that one rank holds."""

    shard: Shard
    rank: int
    writer: int
    """The rank that writes this shard: `rank`, or another rank with the same bytes."""

    @property
    def writes(self) -> bool:
        """True if this rank writes the shard."""
        return self.rank == self.writer

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.shard.layers[1] - self.shard.layers[0]

    @property
    def heads(self) -> int | None:
        """The number of KV heads, or None for MLA."""
        return self.shard.heads and self.shard.heads[1] - self.shard.heads[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The groups of layers and heads into which a fleet splits pages, so that engines can share them.

    Groups are counted from the model's first layer and head. The last group may be smaller. If a
    field is None, pages are not split in that direction, and only ranks with equal ranges share pages.
    """

    head_group: int | None = None
    layer_group: int | None = None

    def __post_init__(self) -> None:
        _check_sizes(self, "head_group", "layer_group")

    @classmethod
    def coarsest(cls, extent: Extent, topologies: Sequence[Topology]) -> Grid:
        """Return the grid with the largest groups that fit all `topologies`, which gives few pages."""
        parts = [part.shard for topology in topologies for part in topology.parts(extent)]
        layers = [end for shard in parts for end in shard.layers if end != extent.layers]
        heads = [end for shard in parts for end in shard.heads or () if end != extent.heads]
        return cls(
            head_group=None if extent.heads is None else math.gcd(*heads) or extent.heads,
            layer_group=math.gcd(*layers) or extent.layers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The ranks of one engine. With data-parallel attention, `tp_size` is an attention group's size.

    Raises:
        ConfigError: A size is below 1.
    """

    tp_size: int = 1
    pp_size: int = 1

    def __post_init__(self) -> None:
        _check_sizes(self, "tp_size", "pp_size")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.tp_size * self.pp_size

    def part(self, extent: Extent, rank: int) -> Part | None:
        """Return the part of a pool that `rank` holds, or None if its stage has no layer of the pool.

        Raises:
            ConfigError: The pool cannot be split like this. The message lists the sizes that fit.
            ValueError: There is no such rank.
        """
        if not 0 <= rank < self.size:
            raise ValueError(f"there is no rank {rank}: this engine has ranks 0 to {self.size - 1}")
        pp_rank, tp_rank = divmod(rank, self.tp_size)
        layers = _stages(extent, self.pp_size)[pp_rank]
        if layers[0] == layers[1]:
            return None
        heads, first = self._heads(extent, tp_rank)
        writer = pp_rank * self.tp_size + first
        return Part(shard=Shard(layers=layers, heads=heads), rank=rank, writer=writer)

    def parts(self, extent: Extent) -> list[Part]:
        """Return the parts of all ranks that hold something of the pool, in the order of the ranks."""
        parts = [self.part(extent, rank) for rank in range(self.size)]
        return [part for part in parts if part is not None]

    def writers(self, extent: Extent) -> dict[Shard, int]:
        """Return every shard of a pool with the one rank that writes it."""
        return {part.shard: part.writer for part in self.parts(extent)}

    def tiles(self, extent: Extent, rank: int, grid: Grid) -> tuple[Tile, ...]:
        """Return the tiles into which `HostPool` splits the pages of `rank`.

        Raises:
            ConfigError: Some rank's part ends inside a group of the grid. Every rank raises this. The
                message lists the sizes that fit.
            ValueError: There is no such rank, or it holds nothing of the pool.
        """
        if not _fits(self, extent, grid):
            raise ConfigError(self._refusal(extent, grid))
        part = self.part(extent, rank)
        if part is None:
            raise ValueError(f"rank {rank} holds nothing of this pool")
        layer_groups = _groups(part.layers, grid.layer_group)
        if part.heads is None:
            return tuple(Tile(layers) for layers in layer_groups)
        head_groups = _groups(part.heads, grid.head_group)
        return tuple(Tile(layers, heads) for layers in layer_groups for heads in head_groups)

    def _heads(self, extent: Extent, tp_rank: int) -> tuple[tuple[int, int] | None, int]:
        """Return the heads of a rank, and the first rank of its stage that has the same heads."""
        total, size = extent.heads, self.tp_size
        if total is None:
            return None, 0
        if total % size and size % total:
            fit = [n for n in range(1, total + 1) if total % n == 0]
            raise ConfigError(
                f"tp_size {size} does not split {total} KV heads evenly: use"
                f" {_listed('tp_size', fit)}, or a multiple of {total}"
            )
        group = max(1, total // size)
        copies = max(1, size // total)
        start = tp_rank // copies * group
        return (start, start + group), tp_rank // copies * copies

    def _refusal(self, extent: Extent, grid: Grid) -> str:
        own = Grid.coarsest(extent, [self])
        problems: list[str] = []
        advice: list[str] = []
        by_heads = Grid(head_group=grid.head_group)
        if not _fits(self, extent, by_heads):
            problems.append(
                f"tp_size {self.tp_size} does not tile {extent.heads} KV heads in groups of"
                f" {grid.head_group}"
            )
            fit = [n for n in _SIZES if _tiles(extent, by_heads, tp_size=n)]
            advice.append(f"{_listed('tp_size', fit)}, or head_group {own.head_group}")
        by_layers = Grid(layer_group=grid.layer_group)
        if not _fits(self, extent, by_layers):
            ends = ", ".join(str(end) for _, end in _stages(extent, self.pp_size)[:-1])
            problems.append(
                f"pp_size {self.pp_size} splits {extent.layers} layers at {ends}, which does not tile"
                f" groups of {grid.layer_group}"
            )
            fit = [n for n in _SIZES if _tiles(extent, by_layers, pp_size=n)]
            advice.append(f"{_listed('pp_size', fit)}, or layer_group {own.layer_group}")
        return f"{'; '.join(problems)}: use {'; and '.join(advice)}"


def _check_sizes(owner: object, *names: str) -> None:
    """Refuse sizes that are neither None nor whole numbers of at least 1."""
    for name in names:
        size = getattr(owner, name)
        if size is not None:
            _check_size(name, size, least=1)


def _check_size(name: str, size: object, *, least: int) -> None:
    try:
        check_integer(name, size, least=least)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from None


def _stages(extent: Extent, pp_size: int) -> list[tuple[int, int]]:
    """Return the layers of each stage. In an uneven split the last stages have one more layer.

    Source: sglang/srt/distributed/utils.py (0.5.23), `get_pp_indices`.
    """
    split = extent.stage_layers
    if split is None:
        least, more = divmod(extent.layers, pp_size)
        if not least:
            raise ConfigError(
                f"pp_size {pp_size} leaves stages without any of {extent.layers} layers: use"
                f" {_listed('pp_size', range(1, extent.layers + 1))}, or say with stage_layers where"
                " they are"
            )
        split = (least,) * (pp_size - more) + (least + 1,) * more
    elif len(split) != pp_size:
        raise ConfigError(
            f"stage_layers {split} are for {len(split)} stages, but pp_size is {pp_size}"
        )
    return list(pairwise(accumulate(split, initial=0)))


def _fits(topology: Topology, extent: Extent, grid: Grid) -> bool:
    """Return True if no rank's part ends inside a group."""
    return all(
        _aligned(part.shard.layers, grid.layer_group, extent.layers)
        and _aligned(part.shard.heads, grid.head_group, extent.heads)
        for part in topology.parts(extent)
    )


def _tiles(extent: Extent, grid: Grid, *, tp_size: int = 1, pp_size: int = 1) -> bool:
    """Return True if an engine of this size fits the grid."""
    split = Extent(layers=extent.layers, heads=extent.heads)
    try:
        return _fits(Topology(tp_size=tp_size, pp_size=pp_size), split, grid)
    except ConfigError:
        return False


def _aligned(held: tuple[int, int] | None, group: int | None, total: int | None) -> bool:
    if held is None or group is None:
        return True
    return all(end % group == 0 or end == total for end in held)


def _groups(size: int, group: int | None) -> list[tuple[int, int]]:
    """Split the range from 0 to `size` into groups of `group`. The last group may be smaller."""
    step = group or size
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def _listed(name: str, sizes: Iterable[int]) -> str:
    """Return a text such as `tp_size 1, 2 or 4`."""
    *most, last = [str(size) for size in sizes]
    return f"{name} {', '.join(most)} or {last}" if most else f"{name} {last}"
