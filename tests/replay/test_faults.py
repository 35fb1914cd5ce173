"""`--faults PLAN`: syntax, errors and effects."""

from __future__ import annotations

import pytest
from hicache_backends.memory import MemoryStorage
from pages import hash_of, space

from hicache_storage.errors import ConfigError, StorageUnavailable
from hicache_storage.replay.faults import FaultPlan, fault_counts
from hicache_storage.testing import Fault, Odds, Strike

HASHES = [hash_of(1)]


def test_an_item_is_operation_fault_and_share() -> None:
    plan = FaultPlan.parse("get:raise@5%, set:flip@0.5%,exists:miss@12")

    assert plan.plan == (
        Odds("batch_get", Fault.RAISE, 0.05),
        Odds("batch_set", Fault.FLIP, 0.005),
        Strike("batch_exists", 12, Fault.MISS),
    )


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.value)
def test_every_fault_has_a_name(fault: Fault) -> None:
    assert FaultPlan.parse(f"delete:{fault.value}@100%").plan == (Odds("batch_delete", fault, 1.0),)


def test_settings_are_those_of_the_storage() -> None:
    plan = FaultPlan.parse("get:raise@5%,seed=7,delay_s=0.25,hang_s=0.5")

    assert plan.settings == {"seed": 7, "delay_s": 0.25, "hang_s": 0.5}


def test_a_hang_ends_by_default() -> None:
    assert FaultPlan.parse("get:hang@1%").settings["hang_s"] > 10


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "names no fault"),
        ("seed=7", "names no fault"),
        ("get", "get: must be OPERATION:FAULT@SHARE"),
        ("get:raise", "get:raise: must be OPERATION:FAULT@SHARE"),
        ("got:raise@5%", "unknown operation 'got'; did you mean 'get'"),
        ("get:rise@5%", "unknown fault 'rise'; did you mean 'raise'"),
        ("get:raise@0%", "above 0 %, at most 100 %"),
        ("get:raise@101%", "above 0 %, at most 100 %"),
        ("get:raise@many%", "needs a number, 0 or more, not 'many'"),
        ("get:raise@-1", "needs a whole number, 0 or more, not '-1'"),
        ("get:raise@1.5", "needs a whole number, 0 or more, not '1.5'"),
        ("get:raise@inf%", "needs a number"),
        ("get:raise@5%,sead=7", "unknown setting 'sead'; did you mean 'seed'"),
        ("get:raise@5%,seed=x", "seed=x: needs a whole number"),
    ],
)
def test_an_invalid_item_is_named(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FaultPlan.parse(text)

    assert "--faults" in str(caught.value)
    assert reason in str(caught.value)


def test_the_same_plan_strikes_the_same_calls() -> None:
    def failed_calls() -> list[int]:
        storage = FaultPlan.parse("exists:raise@20%,seed=7").wrap(MemoryStorage())
        failed: list[int] = []
        for call in range(50):
            try:
                storage.batch_exists(space(), HASHES)
            except StorageUnavailable:
                failed.append(call)
        return failed

    assert failed_calls() == failed_calls()
    assert 0 < len(failed_calls()) < 50


def test_faults_are_counted_over_all_storages() -> None:
    plan = FaultPlan.parse("exists:miss@0,delete:lie@0")
    storages = [plan.wrap(MemoryStorage()) for _ in range(2)]
    for storage in storages:
        storage.batch_exists(space(), HASHES)
        storage.batch_exists(space(), HASHES)
    storages[0].batch_delete(space(), HASHES)

    assert {"exists:miss": 2, "delete:lie": 1} == fault_counts(storages)
