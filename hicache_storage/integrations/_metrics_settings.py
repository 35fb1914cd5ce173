"""The fields of every adapter's settings that say where its metrics are served."""

from __future__ import annotations

from hicache_storage.settings import Field, Settings


class MetricsSettings(Settings):
    """The address of the `hicache_*` metrics. Without a port they are not served by HTTP."""

    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    """The port for Prometheus to scrape. The rank number n of an engine on this host has port + n."""
    metrics_host: str = Field(default="127.0.0.1", min_length=1)
    """The address of this host on which the port is open: "0.0.0.0" for all of them."""
