"""The metrics of adapters: their labels, their ports, and the engine's registry."""

from __future__ import annotations

import logging
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from typing import Any

import pytest
from prometheus_client import REGISTRY
from servers import free_port
from stores import HookedStorage

from hicache_storage.errors import ConfigError, install_command
from hicache_storage.integrations import _metrics
from hicache_storage.integrations._metrics import AdapterMetrics, EngineRegistry
from hicache_storage.integrations._metrics_settings import MetricsSettings
from hicache_storage.metrics import CacheView, ViewCollector, serve
from hicache_storage.page_store import PageStore

logger = logging.getLogger(__name__)


@pytest.fixture
def attach() -> Generator[Callable[..., AdapterMetrics]]:
    """Return a function that adds the metrics of an adapter. All are removed after the test."""
    attached: list[AdapterMetrics] = []

    def add(
        port: int | None = None, view: CacheView | None = None, **options: Any
    ) -> AdapterMetrics:
        shown = view or CacheView(attached=True)
        fields: dict[str, Any] = {"engine": "test", "backend": "redis", "logger": logger, **options}
        settings = MetricsSettings(metrics_port=port)
        attached.append(AdapterMetrics(settings, lambda: shown, **fields))
        return attached[-1]

    yield add
    for each in attached:
        each.close()


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def attached_line(backend: str = "redis", rank: int = 0) -> str:
    return f'hicache_store_attached{{backend="{backend}",engine="test",rank="{rank}"}} 1.0'


class TestPort:
    def test_a_port_shows_the_adapter(self, attach: Callable[..., AdapterMetrics]) -> None:
        port = free_port()
        attach(port)

        assert attached_line() in scraped(port)

    def test_a_rank_has_a_port_of_its_own(self, attach: Callable[..., AdapterMetrics]) -> None:
        port = free_port()
        attach(port - 3, rank=3)

        assert attached_line(rank=3) in scraped(port)

    def test_adapters_of_a_process_share_a_port(
        self, attach: Callable[..., AdapterMetrics]
    ) -> None:
        port = free_port()
        first = attach(port)
        attach(port)
        first.close()
        first.close()

        text = scraped(port)
        assert attached_line("redis-2") in text
        assert attached_line() not in text

    def test_the_last_adapter_frees_the_port(self, attach: Callable[..., AdapterMetrics]) -> None:
        port = free_port()
        attach(port).close()

        with pytest.raises(urllib.error.URLError):
            scraped(port)

    def test_without_a_port_nothing_is_served(self, attach: Callable[..., AdapterMetrics]) -> None:
        attach()

        assert {} == _metrics._PROCESS.get()._servers

    def test_a_port_in_use_is_logged_and_the_engine_starts(
        self, attach: Callable[..., AdapterMetrics], caplog: pytest.LogCaptureFixture
    ) -> None:
        with serve(ViewCollector(), port=0) as other:
            attach(other.port).close()

        (record,) = caplog.records
        assert record.levelno == logging.ERROR
        assert "choose another port" in record.getMessage()
        assert "metrics_port" in record.getMessage()

    def test_a_rank_beyond_the_last_port_is_logged(
        self, attach: Callable[..., AdapterMetrics], caplog: pytest.LogCaptureFixture
    ) -> None:
        attach(65535, rank=1)

        assert "from 1 to 65535" in caplog.text

    def test_an_engine_without_the_extra_is_told_how_to_install_it(
        self,
        attach: Callable[..., AdapterMetrics],
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setitem(sys.modules, "hicache_storage.metrics", None)
        attach(free_port())
        attach(None)

        (record,) = caplog.records
        assert install_command("metrics") in record.getMessage()

    @pytest.mark.parametrize("port", [0, -1, 65536, 1.5, True, "many"])
    def test_a_number_that_is_no_port_is_refused(self, port: Any) -> None:
        with pytest.raises(ConfigError, match="metrics_port"):
            MetricsSettings.parse("test", {"metrics_port": port})


class TestRegistry:
    def test_the_engines_registry_shows_the_adapter(
        self, attach: Callable[..., AdapterMetrics]
    ) -> None:
        labels = {"engine": "test", "backend": "redis", "rank": "0"}
        for _ in range(2):  # an engine may attach again
            adapter = attach(registry=EngineRegistry.DEFAULT)
            assert 1 == REGISTRY.get_sample_value("hicache_store_attached", labels)
            adapter.close()

        assert REGISTRY.get_sample_value("hicache_store_attached", labels) is None

    def test_two_adapters_are_in_one_registry(self, attach: Callable[..., AdapterMetrics]) -> None:
        attach(registry=EngineRegistry.DEFAULT).close()
        attach(registry=EngineRegistry.PROCESSES)
        attach(registry=EngineRegistry.PROCESSES)

        for backend in ("redis", "redis-2"):
            labels = {"engine": "test", "backend": backend, "rank": "0"}
            assert 1 == REGISTRY.get_sample_value("hicache_store_attached", labels)

    def test_another_collector_of_the_metrics_does_not_stop_the_engine(
        self, attach: Callable[..., AdapterMetrics], caplog: pytest.LogCaptureFixture
    ) -> None:
        other = ViewCollector()
        REGISTRY.register(other)
        try:
            attach(registry=EngineRegistry.DEFAULT)
        finally:
            REGISTRY.unregister(other)

        assert "metrics cannot be served" in caplog.text


def test_the_counters_of_an_adapter_are_events_and_present_values(
    attach: Callable[..., AdapterMetrics],
) -> None:
    port = free_port()
    with PageStore(HookedStorage()) as store:
        attach(
            port,
            CacheView(
                store=store,
                attached=False,
                engine={"store_jobs_dropped": 3, "queued_store_nbytes": 4096},
            ),
        )
        text = scraped(port)

    labels = 'backend="redis",engine="test"'
    assert f'hicache_store_attached{{{labels},rank="0"}} 0.0' in text
    assert f'hicache_queued_bytes{{{labels},rank="0"}} 4096.0' in text
    assert f'{{{labels},event="store_jobs_dropped",rank="0"}} 3.0' in text
    assert "queued_store_nbytes" not in text
