"""Split SGLang's extra config into the adapter's settings and the backend's fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

from hicache_storage.config import fields_of_backend
from hicache_storage.errors import ConfigError
from hicache_storage.events.settings import EventSettings
from hicache_storage.integrations._metrics_settings import MetricsSettings
from hicache_storage.integrations._platform import PlatformSettings
from hicache_storage.integrations._switch_interval import SwitchIntervalSettings
from hicache_storage.page_store.admission import AdmissionSettings
from hicache_storage.request_log import ExplainLogSettings
from hicache_storage.settings import Field, PositiveSeconds

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAME = "sglang"
_FIELD = "adapter"


class AdapterSettings(
    MetricsSettings, ExplainLogSettings, SwitchIntervalSettings, PlatformSettings
):
    """The object `adapter` in the extra config. All fields are optional."""

    tenant: str = ""
    """Isolation domain. Servers of different tenants never share a page."""
    revision: str = ""
    """A text that tells apart weights with the same served name."""
    weights: str = ""
    """Name of the weights, in place of their fingerprint, if hosts keep equal weights in other files."""
    dtype: str = ""
    """Logical type of KV stored as bytes, if SGLang's pool does not name it: "float8_e4m3fn"."""
    draft_model: str = ""
    """Name of the draft model, in place of the model's path and the fingerprint of its weights."""
    checksum: Literal["xxh3", "none"] = "xxh3"
    timeout_s: PositiveSeconds = 4.0
    """The deadline of one storage call, which has at most 128 pages and 256 MiB.

    A lookup has half of this time, and so has each call of a bounded store, unless the store's own
    config sets `timeout_s`.
    SGLang ends its server if a storage thread is busy for 10 s at a flush."""
    parallelism: int | None = Field(default=None, ge=1)
    """Concurrent calls to the store in each direction. None: the backend's own number."""
    lend_memory: Literal["safe", "always"] = "safe"
    """Which stores may access SGLang's memory. With "safe", only a store that is revocable; the others
    get copies. With "always", every store, but then a call returns only when the store has ended,
    however long after `timeout_s` that is. Choose it for RDMA to a store that you trust."""
    admission: AdmissionSettings = Field(default_factory=AdmissionSettings)
    """Which pages are written to the store. SGLang gets the result that all pages are written."""
    events: EventSettings | None = None
    """The publisher of KV events, on rank 0. None: no events. Needs the extra `events`."""
    tracing: bool = False
    """Whether the page store makes OpenTelemetry spans. Needs the extra `otel`."""


def split_config(
    extra: Mapping[str, Any] | None,
) -> tuple[str, AdapterSettings, dict[str, Any]]:
    """Return the backend's name, the adapter's settings, and the backend's own fields.

    The backend's fields are next to SGLang's fields, or under `config`, which takes precedence.

    Raises:
        ConfigError: A field is invalid or missing.
    """
    fields = extra or {}
    name = fields.get("backend_name")
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"{_NAME}: backend_name: this field is required: the name of a backend, for example 'redis'"
        )
    settings = AdapterSettings.parse(f"{_NAME}.{_FIELD}", _object(fields.get(_FIELD, {}), _FIELD))
    nested = _object(fields.get("config", {}), "config")
    return name, settings, fields_of_backend(fields, nested)


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{_NAME}: {name}: must be an object, not {type(value).__name__}")
    return cast("dict[str, Any]", value)
