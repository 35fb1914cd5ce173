"""Texts of flags: pools, scales, fault plans, mixes, tolerances, addresses, names of objects."""

from __future__ import annotations

import argparse

from fuzz.choices import Choices
from hicache_backends.redis.access import Address
from hicache_backends.s3.layout import Layout

from hicache_storage.cli.bench import _mix, _tolerance
from hicache_storage.cli.traces import _scale, _seed, number_from_zero, positive_number
from hicache_storage.errors import ConfigError
from hicache_storage.replay.faults import FaultPlan
from hicache_storage.replay.models import check_pools, parse_pool, parse_scale

_TEXTS = (
    "kv:mha,layers=32,heads=8,dim=128,dtype=bfloat16",
    "draft:mla,layers=1,dim=576",
    "1/64",
    "get:raise@5%,set:flip@1%,exists:delay@10%,seed=7",
    "get:hang@12,hang_s=0.5",
    "read=70,write=20,look-up=10",
    "p99=30%",
    "[::1]:6379",
    "0f" * 16 + "/ab/" + "ab" * 32,
)

SEEDS = (b"", *(bytes([n]) + text.encode() for n, text in enumerate(_TEXTS)))
TOKENS = tuple(
    text.encode()
    for text in (
        *(
            "layers=",
            "heads=",
            "dim=",
            "dtype=",
            ",",
            ":",
            "@",
            "%",
            "=",
            "/",
            "1e99",
            "1e-99",
            "0.0",
        ),
        *(
            "get",
            "delete",
            "raise",
            "seed=",
            "delay_s=",
            "read=",
            "p50",
            "[",
            "]",
            "\u0663",
            "9" * 10,
        ),
    )
)


def check(data: bytes) -> None:
    choices = Choices(data)
    kind = choices.integer(0, len(_CHECKS) - 1)
    text = choices.rest().decode("utf-8", "surrogateescape")
    try:
        _CHECKS[kind](text)
    except (ConfigError, argparse.ArgumentTypeError):
        return


def _pool(text: str) -> None:
    pool = parse_pool(text)
    assert pool.name
    for factor in (1.0, 1 / 64):
        shape = pool.shape.scaled(factor)
        assert min(shape.layers, shape.heads, shape.dim) >= 1
    assert parse_pool(f"{pool.name}:{pool.shape}") == pool
    check_pools([pool])


def _scale_of(text: str) -> None:
    try:
        factor = parse_scale(text)
    except ValueError:
        factor = None
    try:
        assert _scale(text) == factor
    except argparse.ArgumentTypeError:
        assert factor is None
        return
    assert factor is not None
    assert 0 < factor <= 1


def _faults(text: str) -> None:
    plan = FaultPlan.parse(text)
    assert plan.plan
    assert set(plan.settings) <= {"seed", "delay_s", "hang_s"}
    assert FaultPlan.parse(plan.text).plan == plan.plan


def _weights(text: str) -> None:
    mix = _mix(text)
    assert mix
    assert all(weight > 0 for weight in mix.values())


def _shares(text: str) -> None:
    name, value = _tolerance(text)
    assert value >= 0
    assert name is None or name in text


def _address(text: str) -> None:
    try:
        address = Address.parse(text)
    except ValueError:
        return
    assert address.host
    assert 0 < address.port < 65536


def _numbers(text: str) -> None:
    assert number_from_zero(text) >= 0
    assert positive_number(text) > 0


def _seeds(text: str) -> None:
    assert isinstance(_seed(text), int)


def _names(text: str) -> None:
    """Assert that a name of an object parses only to the page or key space that has this name."""
    layout = Layout("a/")
    space_id = "0f" * 16
    name = f"a/{text}"
    if layout.is_page(space_id, name):
        assert [name] == layout.pages(space_id, [name.rpartition("/")[2]])
    found = layout.space_id(name)
    assert found is None or name == layout.manifest(found)


_CHECKS = (
    _pool,
    _pool,
    _scale_of,
    _faults,
    _faults,
    _weights,
    _shares,
    _address,
    _names,
    _numbers,
    _seeds,
)
