"""What a master with tenants keeps apart, and what it does not: the claims of docs/security.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import blank, hash_of, page, space
from servers import ROOT, MooncakeMaster, load_mooncake

from hicache_storage import open_storage
from hicache_storage.storage import HiCacheStorage

load_mooncake()

GUIDE = (ROOT / "docs/security.md").read_text(encoding="utf-8")
(QUOTAS,) = re.findall(r"^```yaml\n# quotas.yaml\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
QUOTA_NBYTES = 2 << 20
PAGE_NBYTES = 256 << 10
SPACE = space(page_nbytes=PAGE_NBYTES)
A = hash_of(1)


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    """Run a master with the tenants of the guide, whose quotas are small."""
    directory: Path = tmp_path_factory.mktemp("master")
    quotas = directory / "quotas.yaml"
    quotas.write_text(re.sub(r"quota: .*", f"quota: {QUOTA_NBYTES}", QUOTAS))
    with MooncakeMaster(
        directory,
        "--enable_multi_tenants=true",
        "--tenant_quota_connector_type=file",
        f"--tenant_quota_connector_uri={quotas}",
        "--default_kv_lease_ttl=10s",  # a read on a busy machine takes longer than the tests' 200 ms
    ) as started:
        yield started


@pytest.fixture(scope="module")
def bank(master: MooncakeMaster) -> Iterator[HiCacheStorage]:
    """Return the storage of a tenant, which lends the memory."""
    with opened(master, "bank", global_segment_size="64mb") as storage:
        yield storage


@pytest.fixture(scope="module")
def shop(master: MooncakeMaster, bank: HiCacheStorage) -> Iterator[HiCacheStorage]:
    """Return the storage of another tenant in the same memory."""
    assert bank is not None
    with opened(master, "shop") as storage:
        yield storage


def opened(master: MooncakeMaster, tenant: str, **fields: Any) -> HiCacheStorage:
    config = master.config(**{"global_segment_size": 0, "tenant_id": tenant, **fields})
    storage = open_storage("mooncake", config)
    storage.open_space(SPACE)
    return storage


def test_a_tenant_neither_reads_nor_deletes_pages_of_another(
    bank: HiCacheStorage, shop: HiCacheStorage
) -> None:
    assert [True] == bank.batch_set(SPACE, [A], [page(PAGE_NBYTES)])

    assert [False] == shop.batch_exists(SPACE, [A])
    assert [False] == shop.batch_get(SPACE, [A], [blank(PAGE_NBYTES)])
    shop.batch_delete(SPACE, [A])

    assert [True] == bank.batch_exists(SPACE, [A])


def test_a_tenant_beyond_its_quota_evicts_its_own_pages_only(
    bank: HiCacheStorage, shop: HiCacheStorage
) -> None:
    bank.batch_set(SPACE, [A], [page(PAGE_NBYTES)])
    hashes = [hash_of(number) for number in range(100, 124)]

    for page_hash in hashes:
        shop.batch_set(SPACE, [page_hash], [page(PAGE_NBYTES)])

    kept = sum(shop.batch_exists(SPACE, hashes))
    assert 0 < kept * PAGE_NBYTES <= QUOTA_NBYTES
    assert [True] == bank.batch_exists(SPACE, [A])


@pytest.mark.usefixtures("bank")
def test_a_tenant_without_a_quota_is_refused(master: MooncakeMaster) -> None:
    with opened(master, "stranger") as storage:
        assert [False] == storage.batch_set(SPACE, [A], [page(PAGE_NBYTES)])
        assert storage.stats().counters["refused_pages"] == 1


def test_the_name_of_a_tenant_is_no_password(master: MooncakeMaster, bank: HiCacheStorage) -> None:
    bank.batch_set(SPACE, [A], [page(PAGE_NBYTES)])

    with opened(master, "bank") as intruder:
        assert [True] == intruder.batch_get(SPACE, [A], [blank(PAGE_NBYTES)])
