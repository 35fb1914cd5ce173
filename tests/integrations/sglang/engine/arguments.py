"""Every server argument of the installed SGLang is classified, and says nothing by its default."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from importlib import metadata
from typing import Any

import pytest
import sglang_cpu

from hicache_storage.integrations import sglang as adapter
from hicache_storage.integrations.sglang import _arguments

sglang_cpu.stand_in()

ServerArgs: Any = importlib.import_module("sglang.srt.server_args").ServerArgs
NEWEST = metadata.version("sglang").startswith("0.5.23")
ONLY_0_5_22 = {"speculative_skip_dp_mlp_sync"}


def arguments() -> dict[str, Any]:
    return {name: each.default for name, each in inspect.signature(ServerArgs).parameters.items()}


def test_every_argument_is_classified_once() -> None:
    times = Counter(name for name, _, _ in _arguments.classified())

    assert set(arguments()) - set(times) == set()
    assert [name for name, often in times.items() if often > 1] == []


@pytest.mark.skipif(not NEWEST, reason="an older release lacks some")
def test_nothing_is_classified_that_there_is_not() -> None:
    assert set(arguments()) | ONLY_0_5_22 == _arguments.KNOWN


@pytest.mark.skipif(not NEWEST, reason="other releases have other defaults")
def test_the_value_that_says_nothing_is_the_default() -> None:
    silent = {**_arguments.BY_VALUE, **_arguments.DRAFT_BY_VALUE}

    assert {name: arguments()[name] for name in silent} == silent


def test_the_defaults_that_the_adapter_compares_with_are_these() -> None:
    assert adapter.SGLangHiCacheStorage.engine.launch_defaults() == arguments()
