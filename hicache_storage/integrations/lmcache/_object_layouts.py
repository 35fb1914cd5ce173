"""Layouts of LMCache's objects: the shapes and types of their parts, for stores, loads and lookups.

An object has its own layout. A lookup only has LMCache's hint for each object group. The hint may come
from another engine of the same model, or may be missing. Without a hint, the lookup uses the layout of
the object that was stored or loaded last.

With a `serde` the objects are bytes, and only the hints give the layout of the KV in these bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hicache_storage.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.integrations.lmcache._engine import (
        LayoutDesc,
        MemoryObject,
        ObjectKey,
        Serde,
    )

_BYTES = "uint8"
_MAX_KNOWN = 4096


class UnknownLayoutError(ValueError):
    """The identity of an object cannot be determined. The message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The shapes and types of an object's parts, and its size."""

    parts: tuple[tuple[tuple[int, ...], str], ...]
    """The shape and type of each part (LMCache's kernel groups), in the order of their bytes."""
    nbytes: int
    serde: str = ""
    """The name and a digest of the `serde` that turned these parts into the object's bytes."""
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.parts, self.nbytes, self.serde)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def dtype(self) -> str:
        """The logical types, each listed once."""
        return "+".join(dict.fromkeys(dtype for _, dtype in self.parts))

    @property
    def text(self) -> str:
        """A text that is different for any other shape, type or serde."""
        parts = ",".join(f"{'x'.join(map(str, shape))}:{dtype}" for shape, dtype in self.parts)
        return f"{parts};serde={self.serde}" if self.serde else parts

    @property
    def tokens(self) -> int:
        """The tokens of a chunk: the second-last dimension of the first part."""
        shape = self.parts[0][0]
        return shape[-2] if len(shape) > 1 else 1

    @property
    def layers(self) -> int:
        """The number of layers in all parts."""
        return sum(shape[-3] if len(shape) > 2 else 1 for shape, _ in self.parts)

    @property
    def is_latent(self) -> bool:
        """True if no part stores keys and values separately (MLA). All tensor-parallel ranks then have
        the same bytes."""
        return all(len(shape) < 4 or shape[0] == 1 for shape, _ in self.parts)


@dataclass(slots=True)
class _Known:
    """The layouts of one model, rank and object group: from hints, and from the last object."""

    hint: Layout | None = None
    seen: Layout | None = None
    hints: list[Layout] = field(default_factory=list[Layout])


class Layouts:
    """The layouts of objects and lookups. Thread-safe, because each write is one assignment."""

    def __init__(
        self, kv_dtype: str, serde: Mapping[str, Any] | None = None, sizes: Serde | None = None
    ) -> None:
        """Prepare the layouts. Objects of type `uint8` hold KV of the type `kv_dtype`.

        Args:
            kv_dtype: The logical type of KV that LMCache holds as bytes, or "".
            serde: The `serde` object of `--l2-adapter`. None or empty: objects are stored as they are.
            sizes: The processor of that serde, which returns the size of its output.
        """
        self._kv_dtype = kv_dtype
        self.serde: str = _serde_label(serde) if serde else ""
        self._sizes = sizes
        self._parsed: dict[Any, Layout] = {}
        self._known: dict[tuple[str, int, int], _Known] = {}

    def of_object(self, key: ObjectKey, memory: MemoryObject) -> Layout:
        """Return the layout of an object, and remember it for lookups.

        Raises:
            UnknownLayoutError: The logical type of the object's bytes is not known, or its size varies.
        """
        known, nbytes = self._of_key(key), memory.get_size()
        if self.serde:
            layout = self._serialized(known, nbytes)
        else:
            shapes, dtypes = _parts_of(memory)
            layout = self._parse(shapes, dtypes)
            if self._kv_dtype != _BYTES and _is_flat(dtypes, layout):
                raise UnknownLayoutError(
                    "this object is a row of bytes without a shape, as a serde makes them: repeat the"
                    ' "serde" of --l2-adapter in adapter_params'
                )
            if layout.nbytes != nbytes:
                raise UnknownLayoutError(
                    f"an object of {nbytes} bytes has a layout of {layout.nbytes} ({layout.text}):"
                    " objects whose size varies are not stored"
                )
        known.seen = layout
        return layout

    def of_lookup(self, key: ObjectKey, hints: Mapping[int, LayoutDesc]) -> Layout | None:
        """Return the layout for the lookup of a key, or None if no layout of the key is known yet.

        Raises:
            UnknownLayoutError: The hinted layout holds bytes of an unknown logical type.
        """
        known = self._of_key(key)
        hint = hints.get(key.object_group_id)
        if hint is None or not hint.shapes:
            return known.seen
        layout = self._parse(hint.shapes, hint.dtypes, hint)
        if layout is not known.hint:
            known.hint = layout
            if layout not in known.hints:
                known.hints = [*known.hints, layout]
        return layout

    def of_key(self, key: ObjectKey) -> list[Layout]:
        """Return every layout known for a key, so that all its objects can be deleted."""
        known = self._of_key(key)
        return list(dict.fromkeys([*known.hints, *([known.seen] if known.seen else [])]))

    def _of_key(self, key: ObjectKey) -> _Known:
        place = (key.model_name, key.kv_rank, key.object_group_id)
        known = self._known.get(place)
        if known is None:
            if len(self._known) >= _MAX_KNOWN:  # no server has so many models and ranks
                self._known = {}
            known = self._known.setdefault(place, _Known())
        return known

    def _serialized(self, known: _Known, nbytes: int) -> Layout:
        found = [layout for layout in known.hints if layout.nbytes == nbytes]
        if len(found) != 1:
            raise UnknownLayoutError(
                f"an object of {nbytes} bytes was serialized ({self.serde}), but {len(found)} of"
                " the layouts of LMCache's lookups so far have that size: it is not stored"
            )
        return found[0]

    def _parse(
        self, shapes: Sequence[Sequence[int]], dtypes: Sequence[Any], hint: LayoutDesc | None = None
    ) -> Layout:
        raw = (tuple(shapes), tuple(dtypes))
        layout = self._parsed.get(raw)
        if layout is None:
            parts = tuple(
                (tuple(int(size) for size in shape), self._dtype(dtype))
                for shape, dtype in zip(shapes, dtypes, strict=True)
            )
            nbytes = sum(
                math.prod(shape) * int(dtype.itemsize)
                for (shape, _), dtype in zip(parts, dtypes, strict=True)
            )
            if self._sizes is not None:
                nbytes = self._sizes.estimate_serialized_size(hint)
            layout = Layout(parts, nbytes, self.serde)
            if len(self._parsed) >= _MAX_KNOWN:
                self._parsed = {}
            self._parsed[raw] = layout
        return layout

    def _dtype(self, dtype: Any) -> str:
        name = str(dtype).removeprefix("torch.")
        if name != _BYTES:
            return name
        if not self._kv_dtype:
            raise UnknownLayoutError(
                "LMCache holds this KV as uint8, which is e4m3, e5m2 or a packed format: name it in"
                ' adapter_params, for example "kv_dtype": "float8_e4m3fn". If --l2-adapter has a'
                ' "serde", repeat that in adapter_params instead'
            )
        return self._kv_dtype


def _parts_of(memory: MemoryObject) -> tuple[Sequence[Sequence[int]], Sequence[Any]]:
    """Return the shapes and types of an object's parts. Objects of `lmcache bench` have one part."""
    if memory.meta.shapes is None:
        return [memory.get_shape()], [memory.get_dtype()]
    return memory.get_shapes(), memory.get_dtypes()


def _is_flat(dtypes: Sequence[Any], layout: Layout) -> bool:
    return len(layout.parts[0][0]) == 1 and str(dtypes[0]).endswith(_BYTES)


def _serde_label(serde: Mapping[str, Any]) -> str:
    """Return the name of a serde and a digest of its fields.

    Raises:
        ConfigError: The serde has no type.
    """
    name = serde.get("type")
    if not isinstance(name, str) or not name:
        raise ConfigError("lmcache: serde: must have a field 'type', as in --l2-adapter")
    text = json.dumps(dict(serde), sort_keys=True, default=str)
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
