"""A real Prometheus scrapes a replay and faulty caches, so that panels have data and alerts fire.

Debian's package has Prometheus and promtool; `tests/get_servers.sh` fetches it.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from engines import PROMPT, cache_pools, compute
from faulty_caches import FAULTY, FEW_COPIES, OVERRUN, SMALL_TIER, TIERED, faulty_caches
from prometheus_server import ALERTS, Prometheus, alert_rules, promtool
from replays import replay_command
from servers import ROOT, free_port, wait_until
from stores import HookedStorage

from hicache_storage.controller import CacheController
from hicache_storage.handoff import HandoffSender
from hicache_storage.metrics import CacheView, ViewCollector, serve
from hicache_storage.page_store import PageStore

DASHBOARD = ROOT / "deploy/grafana/hicache.json"
PANELS = [
    panel
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    if panel["type"] != "row"
]
QUERIES = [
    pytest.param(target["expr"], id=f"{panel['title']}-{target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]
VARIABLES = {"$__rate_interval": "5s", "$engine": ".*", "$backend": ".*"}
NEVER_FIRES = {"sound", "memory"}
"""The caches without a fault."""


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Generator[Prometheus]:
    """Yield a Prometheus over faulty caches, a replay that changes its store, and a dead port."""
    directory = tmp_path_factory.mktemp("prometheus")
    replay_port = free_port()
    with ExitStack() as opened:
        collector = opened.enter_context(faulty_caches())
        _add_handoff(collector, opened)
        server = opened.enter_context(serve(collector, port=0))
        opened.callback(_end, _replay(directory, replay_port))
        ports = [server.port, replay_port, free_port()]
        yield opened.enter_context(Prometheus(directory, ports))


def _replay(directory: Path, port: int) -> subprocess.Popen[bytes]:
    """Start a replay of 15 minutes, which soon changes from a file store to one in memory."""
    fields = {"path": str(directory / "pages"), "capacity_nbytes": "64MiB"}
    flags = ["--metrics-port", str(port), "--speed", "20", "--host-size", "4MiB"]
    swap = ["--conversations", "5000", "--swap-backend", "memory", "--swap-after", "5"]
    with (directory / "replay.log").open("wb") as log:
        return subprocess.Popen(
            replay_command("file", fields, *flags, *swap), stdout=log, stderr=log
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.poll() is None, "the replay ended before the test"
    process.send_signal(signal.SIGTERM)
    process.wait(20)


def _add_handoff(collector: ViewCollector, opened: ExitStack) -> None:
    store = opened.enter_context(PageStore(HookedStorage()))
    controller = opened.enter_context(CacheController(store, cache_pools()))
    sender = opened.enter_context(HandoffSender(controller, store))
    collector.watch(
        lambda: CacheView(store=store, controller=controller, handoffs=[sender]),
        {"backend": "handoff"},
    )
    compute(controller, PROMPT)
    assert sender.publish("request", PROMPT).result(20) == len(PROMPT)


@pytest.mark.parametrize("expression", QUERIES)
def test_a_panel_has_data(prometheus: Prometheus, expression: str) -> None:
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    assert "$" not in expression

    wait_until(lambda: bool(prometheus.query(expression)))


EXPECTED = [
    *((alert, cache.name) for cache in FAULTY for alert in cache.alerts),
    ("HiCacheStoresDropped", OVERRUN),
    ("HiCacheTierDown", TIERED),
    ("HiCacheTierFull", SMALL_TIER),
    ("HiCacheCopiesSkipped", FEW_COPIES),
    ("HiCacheStoreDetached", "file"),
    ("HiCacheTargetDown", ""),
]


@pytest.mark.parametrize(("alert", "backend"), EXPECTED)
def test_an_alert_fires_on_the_fault_that_it_names(
    prometheus: Prometheus, alert: str, backend: str
) -> None:
    wait_until(lambda: (alert, backend) in prometheus.firing())


def test_every_alert_has_a_fault() -> None:
    assert set(alert_rules()) == {alert for alert, _ in EXPECTED}


def test_no_alert_fires_on_a_sound_store(prometheus: Prometheus) -> None:
    """Until its first load, a sound store looks like one that is never read, so an alert may fire."""
    sound = [
        f'sum(hicache_pages_total{{backend="{name}",direction="load",verdict="ok"}}) > 0'
        for name in NEVER_FIRES
    ]
    wait_until(lambda: all(prometheus.query(each) for each in sound))

    wait_until(lambda: not {b for _, b in prometheus.firing()} & NEVER_FIRES)


def test_promtool_accepts_the_rules() -> None:
    checked = promtool("check", "rules", ALERTS)

    assert checked.returncode == 0, checked.stderr


# --- how long a fault lasts before the alert
# ----------------------------------------------------------------------------------------

_RISING, _RISING_FAST = "0+6x600", "0+2000x600"
DURATIONS = {
    "HiCacheTargetDown": (5, {'up{job="hicache"}': "0x600"}),
    "HiCacheStoreDetached": (5, {"hicache_store_attached": "0x600"}),
    "HiCacheBreakerOpen": (2, {'hicache_breaker_open{direction="load"}': "1x600"}),
    "HiCacheTierDown": (2, {'hicache_tier_state{tier="nvme/a",state="closed"}': "0x600"}),
    "HiCacheLookupsFail": (5, {'hicache_match_seconds_count{verdict="timeout"}': _RISING}),
    "HiCacheLoadsFail": (
        5,
        {'hicache_pages_total{direction="load",verdict="unavailable"}': _RISING},
    ),
    "HiCacheSavesFail": (5, {'hicache_pages_total{direction="save",verdict="error"}': _RISING}),
    "HiCacheSavesRefused": (
        10,
        {'hicache_pages_total{direction="save",verdict="refused"}': _RISING},
    ),
    "HiCacheTierFull": (
        10,
        {'hicache_storage_events_total{tier="nvme",event="refused_no_space"}': _RISING},
    ),
    "HiCacheCopiesSkipped": (
        10,
        {'hicache_storage_events_total{tier="bucket",event="writeback_skipped"}': _RISING},
    ),
    "HiCacheWrongPages": (0, {'hicache_pages_total{direction="load",verdict="corrupt"}': _RISING}),
    "HiCacheSlowLoads": (
        10,
        {
            f'hicache_load_seconds_bucket{{verdict="ok",le="{limit}"}}': series
            for limit, series in (("1.0", "0x600"), ("2.5", _RISING), ("+Inf", _RISING))
        },
    ),
    "HiCacheStoresDropped": (
        10,
        {'hicache_controller_events_total{event="dropped_pages"}': _RISING},
    ),
    "HiCacheNeverRead": (
        60,
        {'hicache_pages_total{direction="save",verdict="ok"}': _RISING_FAST},
    ),
}
"""For each alert, how many minutes it waits, and series of values per minute with its fault."""
SOUND = {
    'up{job="hicache"}': "1x600",
    "hicache_store_attached": "1x600",
    'hicache_breaker_open{direction="load"}': "0x600",
    'hicache_tier_state{tier="nvme/a",state="closed"}': "1x600",
    'hicache_match_seconds_count{verdict="ok"}': _RISING_FAST,
    'hicache_match_seconds_count{verdict="timeout"}': "0+1x600",
    'hicache_pages_total{direction="load",verdict="ok"}': _RISING_FAST,
    'hicache_pages_total{direction="load",verdict="timeout"}': "0+1x600",
    'hicache_pages_total{direction="load",verdict="corrupt"}': "0x600",
    'hicache_pages_total{direction="save",verdict="ok"}': _RISING_FAST,
    'hicache_pages_total{direction="save",verdict="refused"}': "0+1x600",
    'hicache_storage_events_total{tier="nvme",event="refused_no_space"}': "0+1x600",
    'hicache_storage_events_total{tier="nvme",event="hits"}': _RISING_FAST,
    'hicache_storage_events_total{tier="bucket",event="writeback_skipped"}': "0+1x600",
    'hicache_load_seconds_bucket{verdict="ok",le="0.1"}': _RISING_FAST,
    'hicache_load_seconds_bucket{verdict="ok",le="+Inf"}': _RISING_FAST,
    'hicache_controller_events_total{event="dropped_pages"}': "0x600",
}
"""Series of a sound store, with the few failures that every store has."""


def _judge(directory: Path, series: dict[str, str], counts: list[tuple[str, int, int]]) -> None:
    """Let promtool check that `number` alerts of a name fire at a minute, for each of `counts`."""
    tests = {
        "rule_files": [str(ALERTS)],
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": each, "values": series[each]} for each in series],
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})',
                        "eval_time": f"{minute}m",
                        "exp_samples": [{"labels": "{}", "value": number}] if number else [],
                    }
                    for alert, minute, number in counts
                ],
            }
        ],
    }
    file = directory / "tests.yml"
    file.write_text(yaml.safe_dump(tests), encoding="utf-8")
    done = promtool("test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", alert_rules())
def test_an_alert_waits_for_its_time(tmp_path: Path, alert: str) -> None:
    """Rates and increases need two samples, so the condition holds only from the second minute on."""
    minutes, series = DURATIONS[alert]
    quiet = [(alert, minutes - 1, 0)] if minutes else []

    _judge(tmp_path, series, [*quiet, (alert, minutes + 3, 1)])


def test_few_failures_raise_no_alert(tmp_path: Path) -> None:
    _judge(tmp_path, SOUND, [(alert, minute, 0) for alert in alert_rules() for minute in (30, 400)])


# --- the files themselves
# ----------------------------------------------------------------------------------------


def _names(texts: list[str]) -> set[str]:
    found = {name for text in texts for name in re.findall(r"\bhicache_[a-z0-9_]+", text)}
    return {re.sub(r"_seconds_(bucket|count|sum)$", "_seconds", name) for name in found}


def test_alerts_and_dashboard_use_metrics_of_the_page() -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(hicache_[a-z0-9_]+)`", page, re.MULTILINE))
    rules: list[Any] = list(alert_rules().values())
    queries = [target["expr"] for panel in PANELS for target in panel["targets"]]

    assert set() == _names([*queries, *(rule["expr"] for rule in rules)]) - documented


def test_every_alert_is_on_the_page() -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")

    assert set(alert_rules()) == set(re.findall(r"^\| `(HiCache\w+)`", page, re.MULTILINE))


def test_panels_lie_beside_each_other() -> None:
    """No two panels overlap, and each panel has a unique number."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    cells = [
        (place["x"] + column, place["y"] + line)
        for place in (panel["gridPos"] for panel in dashboard)
        for column in range(place["w"])
        for line in range(place["h"])
    ]

    assert len(cells) == len(set(cells))
    assert {column for column, _ in cells} <= set(range(24))
    assert len(dashboard) == len({panel["id"] for panel in dashboard})
