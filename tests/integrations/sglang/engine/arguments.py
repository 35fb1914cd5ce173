"""Every server argument of the installed SGLang is classified, and its default is neutral."""

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
    assert [name for name, count in times.items() if count > 1] == []


@pytest.mark.skipif(not NEWEST, reason="an older release lacks some")
def test_every_classified_argument_exists() -> None:
    assert set(arguments()) | ONLY_0_5_22 == _arguments.KNOWN


@pytest.mark.skipif(not NEWEST, reason="other releases have other defaults")
def test_the_neutral_value_is_the_default() -> None:
    neutral = {**_arguments.BY_VALUE, **_arguments.DRAFT_BY_VALUE}

    assert {name: arguments()[name] for name in neutral} == neutral


def test_the_adapter_compares_with_these_defaults() -> None:
    assert adapter.SGLangHiCacheStorage.engine.launch_defaults() == arguments()
