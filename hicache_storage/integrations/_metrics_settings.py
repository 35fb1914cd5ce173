"""Settings that every adapter has for its metrics: the port and the address."""

from __future__ import annotations

from hicache_storage.settings import Field, Settings


class MetricsSettings(Settings):
    """Where the `hicache_*` metrics are served. Without a port they are not served over HTTP."""

    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    """The port that Prometheus scrapes. On one host, rank n of an engine uses this port + n."""
    metrics_host: str = Field(default="127.0.0.1", min_length=1)
    """The address of this host that the port is open on. "0.0.0.0" means all of them."""
