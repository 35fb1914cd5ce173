"""The adapter's fields in vLLM's `kv_connector_extra_config`, and in the config of a tier."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, Literal, cast

from hicache_storage.errors import ConfigError
from hicache_storage.integrations._backend_choice import backend_fields
from hicache_storage.integrations._jobs import JobSettings
from hicache_storage.integrations._metrics_settings import MetricsSettings
from hicache_storage.integrations._platform import PlatformSettings
from hicache_storage.request_log import TraceSettings
from hicache_storage.settings import Field, PositiveSeconds, Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "vllm"
TIER = "HiCacheTier"
MODULE = "hicache_storage.integrations.vllm"
SPEC = "TieringOffloadingSpec"

# vLLM's own fields of the extra config. The adapter leaves them as they are.
_ENGINE_FIELDS = frozenset(
    {
        "backpressure",
        "block_size",
        "blocks_per_chunk",
        "cache_policy_module_path",
        "canonical_layout",
        "cpu_bytes_to_use",
        "enable_telemetry",
        "eviction_policy",
        "max_tracker_size",
        "offload_prompt_only",
        "secondary_tiers",
        "self_describing_kv_events",
        "spec_module_path",
        "spec_name",
        "store_threshold",
        "sync_load_budget_bytes",
        "tier_poll_interval_s",
    }
)
_TIER_NAMES = frozenset({"type", "module_path", "backpressure"})
"""The names of vLLM's own fields in the config of a tier."""


class IdentitySettings(Settings):
    """Properties of a page's bytes that vLLM does not pass to a tier. The connector computes them."""

    revision: str = Field(min_length=1)
    """Everything else that the bytes depend on: weights, quantization, overrides, hash algorithm."""
    model: str = ""
    """The name of the model. "" stands for the path or name from which vLLM loads the model."""
    dtype: str = ""
    """The logical KV type. "" stands for vLLM's own name of the type."""
    layout: str = ""
    """vLLM's release and platform, and properties of the byte order that a tier cannot see."""
    groups: dict[str, str] = Field(default_factory=dict[str, str])
    """The kind of each group, by the group's number."""


class TierSettings(JobSettings, MetricsSettings, TraceSettings, PlatformSettings):
    """The config of one tier. `backend` is required.

    Without the connector, `identity` is required, too.
    """

    backend: str = Field(min_length=1)
    config: dict[str, Any] | str = Field(default_factory=dict[str, Any])
    """The backend's own fields, or "@" followed by the path of a file (.json, .toml, .yaml)."""
    identity: IdentitySettings | None = None
    tenant: str = ""
    """Isolation domain. Servers of different tenants never share a page."""
    revision: str = ""
    """A text that tells apart weights with the same served name."""
    weights: str = ""
    """Name of the weights, in place of their fingerprint, if hosts keep equal weights in other files."""
    kv_dtype: str = ""
    """Logical type of the KV, if `--kv-cache-dtype` does not name it, for example "float8_e4m3fn"."""
    single_node: bool = False
    """Whether all workers are on this node, although the executor could use several nodes."""
    checksum: Literal["xxh3", "none"] = "xxh3"
    parallelism: int | None = Field(default=None, ge=1)
    """Concurrent calls to the store in each direction. None: the backend's own number."""
    enable_kv_events: bool = False
    """Whether the tier reports stored and removed pages as vLLM's KV events."""
    locality: Literal["LOCAL", "REMOTE"] | None = None
    """The `locality` of the store in these events."""
    start_timeout_s: PositiveSeconds = 5.0
    """How long the start of the engine waits for the store. The store is tried again afterwards."""
    close_timeout_s: PositiveSeconds = 10.0
    """How long the end of the engine waits for stores that are running."""

    def backend_fields(self) -> dict[str, Any]:
        """Return the backend's own fields.

        Raises:
            ConfigError: The file cannot be read, or does not hold an object.
        """
        return backend_fields(self.config, f"{NAME}: config")


def tier_settings(fields: Mapping[str, Any]) -> TierSettings:
    """Parse the config of a tier, except for vLLM's own fields.

    Raises:
        ConfigError: A field is invalid, unknown or missing. The message names it.
    """
    return TierSettings.parse(NAME, own_fields(fields))


def own_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a tier without vLLM's own fields."""
    return {key: fields[key] for key in fields if key not in _TIER_NAMES}


def complete_tiers(extra: dict[str, Any]) -> list[dict[str, Any]]:
    """Move our fields of vLLM's extra config into an entry of `secondary_tiers`. Return our entries.

    The entry becomes the last one, so vLLM first asks the tiers that the config lists. A second call
    changes nothing.

    Raises:
        ConfigError: A field is invalid, or there is no backend.
    """
    if extra.setdefault("spec_name", SPEC) != SPEC:
        raise ConfigError(f"{NAME}: spec_name: must be {SPEC!r}, or absent, for storage tiers")
    if not isinstance(extra.setdefault("secondary_tiers", []), list):
        raise ConfigError(f"{NAME}: secondary_tiers: must be a list")
    _check_names(extra)
    own = {name: extra.pop(name) for name in list(extra) if name in TierSettings.model_fields}
    if own:
        extra["secondary_tiers"].append({"type": TIER, "module_path": MODULE, **own})
    ours: list[dict[str, Any]] = list(filter(_is_ours, extra["secondary_tiers"]))
    if not ours:
        raise ConfigError(
            f"{NAME}: backend: this field is required in kv_connector_extra_config: the name of a"
            " backend, for example 'redis'"
        )
    for tier in ours:
        tier.setdefault("module_path", MODULE)
        tier_settings(tier)
    return ours


def _is_ours(tier: Any) -> bool:
    return isinstance(tier, dict) and cast("Any", tier).get("type") == TIER


def _check_names(extra: Mapping[str, Any]) -> None:
    """Raise ConfigError for a name that is nearly one of ours, because vLLM ignores unknown fields."""
    for name in sorted(set(extra) - set(TierSettings.model_fields) - _ENGINE_FIELDS):
        if similar := difflib.get_close_matches(name, sorted(TierSettings.model_fields), n=1):
            raise ConfigError(f"{NAME}: unknown field {name!r}; did you mean {similar[0]!r}?")
