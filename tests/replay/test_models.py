"""KV shapes: presets, `--pool` syntax, scaling."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hicache_storage.errors import ConfigError
from hicache_storage.replay.models import (
    PRESETS,
    KVShape,
    PoolShape,
    check_pools,
    parse_pool,
    parse_scale,
)

_MHA = KVShape("mha", 32, 8, 128)
_MLA = KVShape("mla", 61, 1, 576)


class TestShapes:
    def test_llama_8b_takes_128_kib_a_token(self) -> None:
        assert PRESETS["llama-3.1-8b"].target.page(1).nbytes == 128 << 10

    def test_deepseek_v3_takes_the_latent_of_each_layer(self) -> None:
        assert PRESETS["deepseek-v3"].target.page(64).nbytes == 64 * 61 * 576 * 2

    @pytest.mark.parametrize("name", PRESETS)
    def test_every_preset_has_a_draft_of_one_layer(self, name: str) -> None:
        target, draft = PRESETS[name].pools

        assert (target.name, draft.name) == ("kv", "draft")
        assert replace(target.shape, layers=1) == draft.shape

    def test_an_unknown_dtype_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"bfloat61.*did you mean 'bfloat16'"):
            replace(_MHA, dtype="bfloat61").page(64)


class TestScaling:
    @pytest.mark.parametrize(
        ("factor", "expected"),
        [
            (1.0, _MHA),
            (1 / 2, replace(_MHA, dim=64)),
            (1 / 128, replace(_MHA, dim=1)),
            (1 / 512, replace(_MHA, dim=1, heads=2)),
            (1 / 4096, replace(_MHA, dim=1, heads=1, layers=8)),
            (1e-9, replace(_MHA, dim=1, heads=1, layers=1)),
        ],
    )
    def test_dims_go_first_then_heads_then_layers(self, factor: float, expected: KVShape) -> None:
        assert expected == _MHA.scaled(factor)

    @pytest.mark.parametrize("divisor", range(1, 30))
    def test_the_bytes_come_close(self, divisor: int) -> None:
        wanted = _MHA.page(64).nbytes / divisor

        assert _MHA.scaled(1 / divisor).page(64).nbytes == pytest.approx(wanted, rel=0.15)

    @pytest.mark.parametrize("text", ["1/64", "64", "0.015625", "1.5625e-2"])
    def test_a_factor_can_be_written_in_three_ways(self, text: str) -> None:
        assert parse_scale(text) == 1 / 64

    @pytest.mark.parametrize(
        "text",
        ["0", "-1", "1/0", "x", "", "nan", "inf", "1/-2", "1/2/3", "64/", " 64", "1_0", "1e999"],
    )
    def test_anything_else_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match="must be a number like 1/64"):
            parse_scale(text)


class TestPoolSyntax:
    def test_mha(self) -> None:
        text = "kv:mha,layers=32,heads=8,dim=128,dtype=bfloat16"

        assert parse_pool(text) == PoolShape("kv", _MHA)

    def test_mla_in_any_order(self) -> None:
        assert parse_pool("draft:mla,dim=576,layers=61") == PoolShape("draft", _MLA)

    def test_a_shape_is_written_as_it_is_read(self) -> None:
        assert parse_pool(f"kv:{_MHA}").shape == _MHA
        assert parse_pool(f"kv:{_MLA}").shape == _MLA

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("kv", "must be NAME:SHAPE"),
            (":mha,layers=1", "must be NAME:SHAPE"),
            ("kv:", "must be NAME:SHAPE"),
            ("kv:gqa,layers=1", "unknown kind 'gqa'; choose one of mha, mla"),
            ("kv:mha,layer=1", "unknown field 'layer'; did you mean 'layers'?"),
            ("kv:mla,layers=1,heads=8,dim=4", "unknown field 'heads'"),
            ("kv:mha,layers=1,heads=8", "dim: this field is required"),
            ("kv:mha,layers=0,heads=8,dim=1", "layers: must be a whole number, 1 or more, not '0'"),
            ("kv:mha,layers=x,heads=8,dim=1", "layers: must be a whole number"),
            ("kv:mha,layers=,heads=8,dim=1", "layers: must have a value"),
            ("kv:mha,layers=1,layers=2,heads=8,dim=1", "layers: is given twice"),
        ],
    )
    def test_a_wrong_pool_is_quoted_with_the_reason(self, text: str, reason: str) -> None:
        with pytest.raises(ConfigError) as caught:
            parse_pool(text)

        assert f"--pool {text}: {reason}" in str(caught.value)

    def test_the_target_comes_first(self) -> None:
        pools = [PoolShape("draft", _MHA), PoolShape("kv", _MHA)]

        assert [pool.name for pool in check_pools(pools)] == ["kv", "draft"]

    def test_a_name_twice_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="--pool kv: is given twice"):
            check_pools([PoolShape("kv", _MHA), PoolShape("kv", _MLA)])

    def test_a_cache_without_a_target_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="'kv', is missing"):
            check_pools([PoolShape("draft", _MHA)])
