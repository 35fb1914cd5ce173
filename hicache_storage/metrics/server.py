"""Serve the metrics of one collector over HTTP, for Prometheus to scrape."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Self

from prometheus_client import CollectorRegistry, start_http_server

from hicache_storage.backend_support.fork_local import ForkLocal
from hicache_storage.errors import ConfigError

if TYPE_CHECKING:
    import threading
    from wsgiref.simple_server import WSGIServer

    from prometheus_client.registry import Collector

LOOPBACK = "127.0.0.1"
_LAST_PORT = 65535


class MetricsServer:
    """An open HTTP endpoint, which daemon threads answer. A context manager.

    A forked child closes its copy of the socket, so the port is free as soon as the parent has ended.
    """

    def __init__(self, collector: Collector, *, port: int, host: str) -> None:
        """Open the endpoint, as `serve` does."""
        registry = CollectorRegistry()
        registry.register(collector)
        self._open: ForkLocal[tuple[WSGIServer, threading.Thread] | None] = ForkLocal(
            lambda: start_http_server(port, host, registry), close=_close, abandon=_abandon
        )
        opened = self._open.get()
        assert opened is not None
        self.host = host
        self.port: int = opened[0].server_port
        self._closed = False

    @property
    def url(self) -> str:
        """The address to scrape."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Close the endpoint. Idempotent."""
        if not self._closed:
            self._closed = True
            self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(collector: Collector, *, port: int, host: str = LOOPBACK) -> MetricsServer:
    """Serve the metrics of `collector` at `http://HOST:PORT/metrics`, until `close`.

    There is no password, so anyone who can reach the port can read the metrics. Port 0 takes a free
    port.

    Raises:
        ConfigError: The port or the address cannot be used. The message says what to do.
    """
    if not 0 <= port <= _LAST_PORT:
        raise ConfigError(
            f"metrics cannot be served on port {port}: choose one from 1 to {_LAST_PORT}"
        )
    try:
        return MetricsServer(collector, port=port, host=host)
    except OSError as error:
        raise ConfigError(f"metrics cannot be served on {host}:{port}: {_advice(error)}") from error


def _advice(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another process listens on this port: end it, or choose another port"
    if error.errno == errno.EACCES:
        return "this user may not open the port: choose 1024 or a higher one"
    return f"{error.strerror or error}: choose an address of this machine, such as {LOOPBACK}"


def _close(opened: tuple[WSGIServer, threading.Thread] | None) -> None:
    if opened is not None:
        server, thread = opened
        server.shutdown()
        server.server_close()
        thread.join()


def _abandon(opened: tuple[WSGIServer, threading.Thread] | None) -> None:
    if opened is not None:
        opened[0].socket.close()
