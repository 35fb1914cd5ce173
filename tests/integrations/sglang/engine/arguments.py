"""Every argument and variable of the installed SGLang is classified, and its default is neutral."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from importlib import metadata
from typing import Any, cast

import pytest
import sglang_cpu

from hicache_storage.integrations import sglang as adapter
from hicache_storage.integrations.sglang import _arguments
from hicache_storage.integrations.sglang._variables import OUTSIDE, VARIABLES

sglang_cpu.stand_in()

ServerArgs: Any = importlib.import_module("sglang.srt.server_args").ServerArgs
NEWEST = metadata.version("sglang").startswith("0.5.23")
ONLY_0_5_22 = {"speculative_skip_dp_mlp_sync"}
VARIABLES_0_5_22 = {
    "SGLANG_DSV41_TORCH_PREFILL_INDEXER",
    "SGLANG_JIT_DEEPGEMM_COMPILE_WORKERS",
    "SGLANG_NPU_DSV4_DEEPEP_LL_DISPATCH_QUANT_MODE",
    "SGLANG_USE_DYNAMIC_MXFP4_LINEAR",
}


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

    defaults = {name: arguments()[name] for name in neutral}
    # An argument of None is absent, and SGLang resolves some of these to a neutral value.
    assert {name: neutral[name] if each is None else each for name, each in defaults.items()} == (
        neutral
    )


def registry() -> dict[str, Any]:
    environ = cast("Any", importlib.import_module("sglang.srt.environ"))
    fields: list[Any] = [*environ.Envs.__dict__.values()]
    named = [each for each in fields if issubclass(type(each), environ.EnvField)]
    return {each.name: each.default for each in named}


def test_every_variable_is_classified_once() -> None:
    times = Counter(name for name, _, _ in VARIABLES.classified())

    assert set(registry()) - set(times) == set()
    assert [name for name, count in times.items() if count > 1] == []


@pytest.mark.skipif(not NEWEST, reason="an older release lacks some")
def test_every_classified_variable_exists() -> None:
    assert set(registry()) | OUTSIDE.keys() | VARIABLES_0_5_22 == VARIABLES.known


def test_the_neutral_value_of_a_variable_is_the_default() -> None:
    neutral = {
        name: value
        for name, value in VARIABLES.entering.items()
        if value is not None and name in registry()  # None: every value enters
    }
    defaults = {name: registry()[name] for name in neutral}

    assert {name: "" if each == () else each for name, each in defaults.items()} == neutral


def test_the_adapter_knows_the_variables_of_sglang() -> None:
    assert set(adapter.SGLangHiCacheStorage.engine.variables()) == registry().keys()


def test_the_adapter_compares_with_these_defaults() -> None:
    assert adapter.SGLangHiCacheStorage.engine.launch_defaults() == arguments()
