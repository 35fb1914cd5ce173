"""What SGLang's extra config says to the adapter, and what it says to the backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

from hicache_storage.errors import ConfigError
from hicache_storage.settings import Field, PositiveSeconds, Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAME = "sglang"
_FIELD = "adapter"

# SGLang's own fields of the extra config. It takes some of them out itself, but not on every path
# (disaggregation/decode_kvcache_offload_manager.py hands over what the user wrote).
_ENGINE_FIELDS = frozenset(
    {
        "allocator",
        "backend_name",
        "class_name",
        "file_storage_path",
        "hicache_storage_pass_prefix_keys",
        "interface_v1",
        "module_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "tp_lcm_size",
    }
)


class AdapterSettings(Settings):
    """The object `adapter` in the extra config. All of it is optional."""

    tenant: str = ""
    """Isolation domain: servers of different tenants never share a page."""
    revision: str = ""
    """Whatever else tells weights apart, where one served name has stood for several."""
    weights: str = ""
    """Name of the weights, in place of their fingerprint: for hosts with the same in other files."""
    dtype: str = ""
    """Logical type of KV that is stored as bytes, where SGLang does not tell: "float8_e4m3fn"."""
    draft_model: str = ""
    """Name of the draft model, in place of its path and the fingerprint of its weights."""
    checksum: Literal["xxh3", "none"] = "xxh3"
    timeout_s: PositiveSeconds = 10.0
    """The deadline of one storage call, of at most 128 pages and 256 MiB."""
    parallelism: int | None = Field(default=None, ge=1)
    """Concurrent calls to the store in each direction; none: what the backend declares."""


def split_config(
    extra: Mapping[str, Any] | None,
) -> tuple[str, AdapterSettings, dict[str, Any]]:
    """The backend's name, the adapter's settings, and the backend's own fields.

    The backend's fields stand beside SGLang's, or under `config`, which wins.

    Raises:
        ConfigError: A field is wrong or missing.
    """
    fields = dict(extra or {})
    name = fields.get("backend_name")
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"{_NAME}: backend_name: this field is required: the name of a backend, for example 'redis'"
        )
    settings = AdapterSettings.parse(f"{_NAME}.{_FIELD}", _object(fields.pop(_FIELD, {}), _FIELD))
    below = _object(fields.pop("config", {}), "config")
    beside = {key: value for key, value in fields.items() if key not in _ENGINE_FIELDS}
    return name, settings, {**beside, **below}


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{_NAME}: {name}: must be an object, not {type(value).__name__}")
    return cast("dict[str, Any]", value)
