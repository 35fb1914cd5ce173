"""Settings that every adapter has for its metrics: the port and the address."""

from __future__ import annotations

from hicache_storage.settings import Field, Settings


class MetricsSettings(Settings):
    """The address at which `hicache_*` metrics are served. Without a port, HTTP does not serve them."""

    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    """The port that Prometheus scrapes. On one host, rank n of an engine uses this port + n."""
    metrics_host: str = Field(default="127.0.0.1", min_length=1)
    """The address of this host at which the port is open. "0.0.0.0" stands for all addresses."""
