"""LMCache's types, and records that the adapter passes to it. This module does not import LMCache.

Source: lmcache/v1/distributed/api.py, internal_api.py, l2_adapters/base.py, memory_management.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class ObjectKey(Protocol):
    """`ObjectKey`: the hash of a chunk, and the part of the model that the object holds. Hashable."""

    @property
    def chunk_hash(self) -> bytes: ...
    @property
    def model_name(self) -> str: ...
    @property
    def kv_rank(self) -> int: ...
    @property
    def object_group_id(self) -> int: ...
    @property
    def cache_salt(self) -> str: ...


class LayoutDesc(Protocol):
    """`MemoryLayoutDesc`: the shapes (`torch.Size`) and types (`torch.dtype`) of an object's parts."""

    @property
    def shapes(self) -> Sequence[Sequence[int]]: ...
    @property
    def dtypes(self) -> Sequence[Any]: ...


class MemoryObject(Protocol):
    """`MemoryObj`: one object in the memory of LMCache's L1."""

    @property
    def meta(self) -> Any: ...
    @property
    def byte_array(self) -> Any: ...
    def get_size(self) -> int: ...
    def get_shape(self) -> Sequence[int]: ...
    def get_dtype(self) -> Any: ...
    def get_shapes(self) -> Sequence[Sequence[int]]: ...
    def get_dtypes(self) -> Sequence[Any]: ...


class MemoryDesc(Protocol):
    """`L1MemoryDesc`: the memory arena of LMCache's L1."""

    @property
    def ptr(self) -> int: ...
    @property
    def size(self) -> int: ...


class Serde(Protocol):
    """`SerdeProcessor`: the conversion of an object before LMCache stores it."""

    def estimate_serialized_size(self, layout_desc: Any) -> int: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class KeyFields:
    """The fields of LMCache's `ObjectKey` that all objects of a key space share."""

    model_name: str
    kv_rank: int
    object_group_id: int
    cache_salt: str


@dataclass(frozen=True, slots=True)
class ListedObject:
    """An object in the store: the fields of its `ObjectKey`, and its size."""

    key: KeyFields
    page_hash: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class EngineTypes:
    """LMCache's classes and functions that the adapter calls."""

    bitmap: Callable[[int], Any]
    store_result: Callable[[bool, int], Any]
    reconfigure_error: Callable[[int, str], Exception]
    """The class of an error that LMCache's HTTP server turns into a status code and a message."""
    memory_tags: Callable[[bool], Any]
    """Function that returns the `MemoryTags` for storage that hosts share (True) or do not share. It
    returns None before 0.5.7, which has no such tags."""
    serde: Callable[[Mapping[str, Any]], Serde]
    """Function that makes the processor for a `serde` object of `--l2-adapter`."""
    key_page: Callable[[Sequence[ListedObject], str | None], Any]
    """Function that returns a `KeyListPage` with these objects and the token of the next page."""
    version: str
    """LMCache's version."""
