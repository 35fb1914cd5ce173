"""The switch interval of the engine's process."""

from __future__ import annotations

import sys
from collections.abc import Generator

import pytest

from hicache_storage import open_storage
from hicache_storage.errors import ConfigError
from hicache_storage.integrations._jobs import JobRunner, JobSettings
from hicache_storage.integrations._switch_interval import SwitchIntervalSettings
from hicache_storage.page_store import PageStore

PYTHONS_S = 0.005


@pytest.fixture(autouse=True)
def pythons_interval() -> Generator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(PYTHONS_S)
    yield
    sys.setswitchinterval(before_s)


def test_storage_threads_wait_a_tenth_of_a_millisecond_by_default() -> None:
    SwitchIntervalSettings().shorten_switch_interval()

    assert pytest.approx(0.0001) == sys.getswitchinterval()


def test_a_shorter_interval_stays() -> None:
    sys.setswitchinterval(0.00005)
    SwitchIntervalSettings().shorten_switch_interval()

    assert pytest.approx(0.00005) == sys.getswitchinterval()


def test_none_leaves_the_interval_as_it_is() -> None:
    SwitchIntervalSettings(switch_interval_s=None).shorten_switch_interval()

    assert pytest.approx(PYTHONS_S) == sys.getswitchinterval()


@pytest.mark.parametrize("seconds", [0, -1, "long"])
def test_the_interval_is_a_positive_number_of_seconds(seconds: object) -> None:
    with pytest.raises(ConfigError, match="switch_interval_s"):
        SwitchIntervalSettings.parse("vllm", {"switch_interval_s": seconds})


def test_a_job_runner_shortens_the_interval() -> None:
    store = PageStore(open_storage("memory", {}))
    runner = JobRunner(store, JobSettings(switch_interval_s=0.001))
    runner.close(5.0)
    store.close()
    store.storage.close()

    assert pytest.approx(0.001) == sys.getswitchinterval()
