from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hicache_storage.composition.claims import weakest
from hicache_storage.storage import Capabilities, Durability, Retention

STRONG = Capabilities(
    retention=Retention.UNTIL_DELETED,
    durability=Durability.POWER,
    shared=True,
    enumerable=True,
    overwrites=False,
    bounded=True,
    revocable=True,
    parallelism=4,
)


@pytest.mark.parametrize(
    "claim",
    [
        {"retention": Retention.UNTIL_PRESSURE},
        {"durability": Durability.PROCESS},
        {"shared": False},
        {"enumerable": False},
        {"overwrites": True},
        {"bounded": False},
        {"revocable": False},
        {"alignment": 4096},
        {"parallelism": 9},
        {"max_batch": 7},
        {"max_page_nbytes": 8},
        {"max_batch_nbytes": 9},
    ],
    ids=str,
)
def test_one_weaker_store_weakens_the_claim(claim: dict[str, Any]) -> None:
    weaker = replace(STRONG, **claim)

    assert weaker == weakest([STRONG, weaker]) == weakest([weaker, STRONG])


def test_the_smallest_limit_holds() -> None:
    limits = [replace(STRONG, max_batch=batch) for batch in (9, None, 7)]

    assert 7 == weakest(limits).max_batch
