"""Types of SGLang that the adapter uses. This module does not import SGLang.

Source: sglang/srt/mem_cache/hicache_storage.py, pool_host/base.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class StorageConfig(Protocol):
    """`HiCacheStorageConfig`: the rank's place in the topology, and the storage's config."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    model_name: str | None
    tp_lcm_size: int | None
    should_split_heads: bool
    extra_config: Mapping[str, Any] | None


class Indices(Protocol):
    """A CPU tensor (int64) with the token slots of a host pool, page after page."""

    def __len__(self) -> int: ...
    def __getitem__(self, key: slice | list[int]) -> Indices: ...
    def reshape(self, *shape: int) -> Indices: ...
    def tolist(self) -> list[int]: ...


class HostPool(Protocol):
    """`HostKVCache`, or another host pool of SGLang."""

    page_size: int
    size: int
    layout: str
    dtype: Any

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]] | None: ...
    def get_data_page(self, index: int, flat: bool = True) -> Any: ...  # noqa: FBT001, FBT002
    def get_dummy_flat_data_page(self) -> Any: ...
    def set_from_flat_data_page(self, index: int, data_page: Any) -> None: ...


class PoolTransfer(Protocol):
    """The pages of one side pool in a call of SGLang."""

    name: str
    host_indices: Indices | None
    keys: Sequence[str] | None
    hit_policy: str


@dataclass(frozen=True, slots=True)
class EngineTypes:
    """SGLang's classes and functions that the adapter calls."""

    pool_transfer_result: Callable[[int, dict[str, int], list[int]], Any]
    storage_metrics: Callable[..., Any]
    launch_arguments: Callable[[], Mapping[str, Any]]
    """Function that returns SGLang's resolved server arguments, which are empty outside a server."""
    launch_defaults: Callable[[], Mapping[str, Any]]
    """Function that returns the defaults of SGLang's server arguments."""
    variables: Callable[[], Mapping[str, str]]
    """Function that returns SGLang's environment variables with this release's defaults. "": none."""
    version: Callable[[], str]
    """Function that returns SGLang's version."""
    fp8_type: Callable[[str], str]
    """Function that returns the torch type of fp8 KV by SGLang's name. "": the name is not of fp8."""
    index_key_order: Callable[[], str]
    """Function that returns the order of index keys in a page. The usual order is ""."""
    replica: Callable[[], int]
    """Function that returns the number of this process's data-parallel replica, counted from 0."""
    argument_overrides: Callable[[], Sequence[Mapping[str, Any]]]
    """Function that returns later changes of arguments in this process, such as a new model path."""
