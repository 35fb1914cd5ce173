"""Tests the host pool for SGLang's zero-copy backends."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest
import torch
from field.sglang.host_pool import SLOTS, host_pool

from hicache_storage.page import Page

PAGE = bytes(range(1, 10))


@pytest.mark.parametrize("nbytes", [1, 2, 7, 4096])
@pytest.mark.parametrize("replicated", [False, True])
def test_a_page_comes_out_as_it_went_in(nbytes: int, replicated: bool) -> None:  # noqa: FBT001
    pool = host_pool(nbytes, replicated=replicated)
    data, found = (PAGE * nbytes)[:nbytes], Page(bytearray(nbytes))
    with pool.take_slots(2) as (_, slot):
        pool.fill(slot, Page(data))
        pool.read(slot, found)

    assert data == found.tobytes()


def test_addresses_are_those_of_k_and_v() -> None:
    pool = host_pool(9, replicated=False)
    pool.fill(3, Page(PAGE))
    addresses, sizes = pool.get_page_buffer_meta(torch.tensor([3]))

    assert [4, 5] == sizes
    assert [PAGE[:4], PAGE[4:]] == list(map(ctypes.string_at, addresses, sizes))


def test_a_replicated_page_is_one_buffer() -> None:
    pool = host_pool(9, replicated=True)
    pool.fill(3, Page(PAGE))
    (address,), (size,) = pool.get_page_buffer_meta(torch.tensor([3]))

    assert PAGE == ctypes.string_at(address, size)


@pytest.mark.parametrize("replicated", [False, True])
def test_flat_pages_are_the_same_bytes(replicated: bool) -> None:  # noqa: FBT001
    pool = host_pool(9, replicated=replicated)
    pool.fill(3, Page(PAGE))
    pool.set_from_flat_data_page(4, pool.get_data_page(3))
    found = Page(bytearray(9))
    pool.read(4, found)

    assert PAGE == found.tobytes()
    assert 9 == pool.get_dummy_flat_data_page().numel()


def test_a_slot_is_taken_by_one_caller_at_a_time() -> None:
    pool = host_pool(9, replicated=True)
    got: list[Any] = []

    def take_slots_in_thread() -> None:
        with pool.take_slots(1) as slots:
            got.extend(slots)

    waiting = threading.Thread(target=take_slots_in_thread)
    with pool.take_slots(SLOTS - 1) as most, pool.take_slots(1) as last:
        waiting.start()
        lent = {*most, *last}
    waiting.join(10)

    assert set(range(SLOTS)) == lent
    assert 1 == len(got)
