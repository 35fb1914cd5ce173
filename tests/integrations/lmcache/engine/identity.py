"""Servers whose objects have different bytes share none, under LMCache's own storage manager."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lmcache_engine import Engine, GroupPlan, Plan
from servers import wait_until

CHUNKS = range(2)
# Ranks of a whole engine, for tests of one server of it.
TP8 = Plan(world_size=8, rank=3)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the params of a server that has stored objects of `Plan()` and of `TP8`."""
    params = {
        "backend": "file",
        "config": {"path": str(tmp_path_factory.mktemp("pages"))},
        "revision": "main",
    }
    with Engine(params) as engine:
        engine.write(CHUNKS)
        engine.plan = TP8
        engine.write(CHUNKS)
    return params


def hits(params: dict[str, Any], *plans: Plan) -> list[int]:
    """Return the number of chunks that a cold server finds for each plan."""
    with Engine(params) as engine:
        found: list[int] = []
        for plan in plans:
            engine.plan = plan
            found.append(engine.read(CHUNKS).chunks)
        return found


def test_an_equal_server_finds_everything(written: dict[str, Any]) -> None:
    assert [2, 2] == hits(written, Plan(), TP8)


def test_a_key_or_layout_that_differs_is_no_hit(written: dict[str, Any]) -> None:
    layouts = (
        GroupPlan(dtypes=("float16",)),
        GroupPlan(shapes=((2, 3, 64, 16),)),
        GroupPlan(shapes=((2, 6, 16, 32),)),
        GroupPlan(shapes=((3, 2, 16, 64),)),
        GroupPlan(shapes=((6, 16, 64),)),
        GroupPlan(shapes=((1, 3, 16, 64), (1, 3, 16, 64)), dtypes=("bfloat16", "bfloat16")),
        GroupPlan(shapes=((2, 3, 16, 64), (2, 3, 16, 1)), dtypes=("bfloat16", "bfloat16")),
    )
    plans = [
        *(Plan(groups=(layout,)) for layout in layouts),
        Plan(model="org-model"),
        Plan(salt="tenant"),
        Plan(groups=(GroupPlan(), GroupPlan())),
        replace(TP8, rank=4),
        replace(TP8, world_size=4),
    ]
    assert [0] * len(plans) == hits(written, *plans)


@pytest.mark.parametrize(
    "change",
    [
        {"revision": "step-2"},
        {"revision": ""},
        {"tenant": "other"},
        {"server": "0/2"},
        {"platform": "rocm-gfx942"},
        {"share_between_releases": True},
    ],
    ids=str,
)
def test_a_setting_that_differs_is_no_hit(change: dict[str, Any], written: dict[str, Any]) -> None:
    assert [0, 0] == hits({**written, **change}, Plan(), TP8)


def test_servers_of_one_engine_share_a_store_by_their_labels(file_params: dict[str, Any]) -> None:
    """Both servers use the keys of rank 0 of 8, but for different heads of the model."""
    plan = Plan(world_size=8)
    held: list[Any] = []
    for server in (0, 1):
        with Engine({**file_params, "server": f"{server}/2"}, plan) as engine:
            held.append(engine.write(CHUNKS, seed=server))
    for server in (0, 1):
        with Engine({**file_params, "server": f"{server}/2"}, plan) as engine:
            assert held[server] == engine.read(CHUNKS).held


def test_kv_in_bytes_needs_its_type(file_params: dict[str, Any]) -> None:
    plan = Plan(groups=(GroupPlan(dtypes=("uint8",)),))
    with Engine(file_params, plan) as engine:
        engine.write(CHUNKS, wait=False)
        engine.wipe()
        assert 0 == engine.read(CHUNKS).chunks
        ((reason, _),) = engine.status["refusals"].items()
        assert "kv_dtype" in reason
    with Engine({**file_params, "kv_dtype": "float8_e4m3fn"}, plan) as engine:
        engine.write(CHUNKS)
    for dtype, found in (("float8_e5m2", 0), ("float8_e4m3fn", 2)):
        with Engine({**file_params, "kv_dtype": dtype}, plan) as engine:
            assert found == engine.read(CHUNKS).chunks


def test_a_lookup_without_a_hint_goes_by_the_objects_so_far(file_params: dict[str, Any]) -> None:
    with Engine(file_params) as engine:
        engine.write(CHUNKS)
        adapter, (keys,) = engine.adapter, engine.plan.keys(range(3))
        (foreign,) = replace(engine.plan, rank=1, world_size=2).keys(range(3))
        found = [_looked_up(adapter, row, {}) for row in (keys, foreign)]
        assert [[True, True, False], [False] * 3] == found


def _looked_up(adapter: Any, keys: list[Any], hints: dict[int, Any]) -> list[bool]:
    task = adapter.submit_lookup_and_lock_task(keys, hints)
    answers: list[Any] = []

    def answered() -> bool:
        answer = adapter.query_lookup_and_lock_result(task)
        if answer is not None:
            answers.append(answer)
        return bool(answers)

    wait_until(answered)
    return [answers[0].test(number) for number in range(len(keys))]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"backend": "rediss"}, "did you mean"),
        ({"tenent": "x"}, "did you mean 'tenant'"),
        ({"config": {"paht": "x"}}, "paht"),
        ({"config": "pages"}, "'@' and the path of a file"),
        ({"config": "@/nowhere.json"}, "/nowhere.json"),
        ({"server": "2/2"}, "server"),
        ({"serde": {"type": "nothing"}}, "nothing"),
    ],
    ids=str,
)
def test_a_wrong_config_ends_the_start_by_name(
    fields: dict[str, Any], message: str, file_params: dict[str, Any]
) -> None:
    with pytest.raises(Exception, match=message):
        Engine({**file_params, **fields})


def test_the_revision_is_required(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="revision: this field is required"):
        Engine({"backend": "file", "config": {"path": str(tmp_path)}})
