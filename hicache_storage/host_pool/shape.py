"""The shape of a page, and the order of its bytes in each layout."""

from __future__ import annotations

from dataclasses import dataclass

from hicache_storage.errors import did_you_mean
from hicache_storage.scalars import check_integer

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")

POOL_AXES = {
    "layer_first": "lnhd",
    "page_first": "nlhd",
    "page_first_direct": "slthd",
    "page_head": "shtld",
}
"""The axes of a plane's array: slot, token in the slot, token in the pool (n), layer, head, dim."""

_LAYOUTS_OF_UNEQUAL_PLANES = ("page_first", "page_first_direct")

STORAGE_TYPES = {  # logical dtype: numpy dtype
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",  # numpy lacks the type; an integer of its width replaces it
    "float8_e4m3fn": "|u1",
    "float8_e4m3fnuz": "|u1",
    "float8_e5m2": "|u1",
    "float8_e5m2fnuz": "|u1",
    "int8": "|i1",
    "uint8": "|u1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageShape:
    """The content of one page, independent of the order of its bytes."""

    page_tokens: int
    layers: int
    dtype: str
    """Logical dtype, as in the key space: "bfloat16", "float8_e4m3fn"."""
    planes: tuple[tuple[int, int], ...]
    """(heads, dim) of K and of V, or one (1, dim) for MLA."""

    def __post_init__(self) -> None:
        if self.dtype not in STORAGE_TYPES:
            hint = did_you_mean(self.dtype, sorted(STORAGE_TYPES))
            raise ValueError(f"unknown dtype {self.dtype!r}{hint}")
        sizes = [("page_tokens", self.page_tokens), ("layers", self.layers)]
        for heads, dim in self.planes:
            sizes += [("heads", heads), ("dim", dim)]
        for name, size in sizes:
            check_integer(name, size, least=1)
        plane_heads = [heads for heads, _ in self.planes]
        if plane_heads != [1] and not (len(plane_heads) == 2 and len(set(plane_heads)) == 1):
            raise ValueError(
                "planes must be K and V with the same number of heads, or one plane with 1 head,"
                f" not {self.planes}"
            )

    @classmethod
    def mha(
        cls,
        *,
        page_tokens: int,
        layers: int,
        heads: int,
        head_dim: int,
        dtype: str,
        v_head_dim: int | None = None,
    ) -> PageShape:
        """Return the shape of K and V of all heads of one shard, for MHA, GQA or MQA."""
        planes = ((heads, head_dim), (heads, head_dim if v_head_dim is None else v_head_dim))
        return cls(page_tokens=page_tokens, layers=layers, dtype=dtype, planes=planes)

    @classmethod
    def mla(cls, *, page_tokens: int, layers: int, kv_dim: int, dtype: str) -> PageShape:
        """Return the shape of one latent for each token and layer; `kv_dim` includes the rope dims."""
        return cls(page_tokens=page_tokens, layers=layers, dtype=dtype, planes=((1, kv_dim),))

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return int(STORAGE_TYPES[self.dtype][-1])

    @property
    def nbytes(self) -> int:
        """Bytes of one page."""
        return sum(self.plane_nbytes)

    @property
    def plane_nbytes(self) -> tuple[int, ...]:
        """Bytes of each plane in one page."""
        unit = self.page_tokens * self.layers * self.itemsize
        return tuple(unit * heads * dim for heads, dim in self.planes)


def check_layout(layout: str, shape: PageShape) -> None:
    """Raise ValueError if the layout is unknown, or if SGLang does not offer it for `shape`."""
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; choose one of {', '.join(LAYOUTS)}")
    if layout == "page_head" and len(shape.planes) == 1:
        raise ValueError("layout 'page_head' splits heads, but MLA has none: use 'page_first'")
    if len(set(shape.planes)) == 2 and layout not in _LAYOUTS_OF_UNEQUAL_PLANES:
        raise ValueError(
            f"layout {layout!r} needs K and V of the same dim, not {shape.planes}:"
            f" use {' or '.join(_LAYOUTS_OF_UNEQUAL_PLANES)}"
        )


def array_shape(layout: str, shape: PageShape, plane: int, slots: int) -> tuple[int, ...]:
    """Return the shape of the array that holds one plane of a pool."""
    heads, dim = shape.planes[plane]
    tokens, layers = shape.page_tokens, shape.layers
    sizes = {"s": slots, "t": tokens, "n": slots * tokens, "l": layers, "h": heads, "d": dim}
    return tuple(sizes[axis] for axis in POOL_AXES[layout])
