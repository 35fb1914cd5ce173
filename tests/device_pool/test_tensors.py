"""Which tensors of an engine a layered pool accepts."""

from __future__ import annotations

import threading

import pytest
import torch
from device_groups import DEVICES, MHA, Pool, expected_page, make_pool, same

from hicache_storage.device_pool import LayerCopier, LayeredPool

TIMEOUT_S = 20


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spare", [1, 2, 4])
def test_the_engines_tensors_may_be_parts_of_larger_ones(spare: int, device: str) -> None:
    """Any strides are allowed, for example if K, V and their scales lie in one tensor."""
    pool = make_pool(MHA, device)
    tokens, heads, dim = pool.planes[0][0].shape
    planes = [
        [
            torch.full((tokens + 3, heads, dim + spare), 7.0, dtype=torch.bfloat16, device=device)[
                ..., :dim
            ]
            for _ in range(MHA.layers)
        ]
        for _ in range(2)
    ]
    strided = Pool(pool.host, planes, LayeredPool(pool.host, planes))
    strided.fill_host(2, seed=16)

    with LayerCopier([strided.layered]) as copier:
        copier.load([[2]], [1]).settled.result(TIMEOUT_S)
        copier.store([1], [[5]]).settled.result(TIMEOUT_S)

    assert same(expected_page(strided, 2), strided.device_page(1))
    assert strided.host_page(2) == strided.host_page(5)
    beyond = [
        tensor.as_strided((tokens + 3, heads, spare), tensor.stride(), dim) for tensor in planes[0]
    ]
    assert all(bool((rest == 7).all()) for rest in beyond)


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_made_in_inference_mode_can_be_loaded_into(device: str) -> None:
    """Engines make such tensors. Torch refuses to write to them outside inference mode."""
    with torch.inference_mode():
        pool = make_pool(MHA, device)
    pool.fill_host(0, seed=15)

    with LayerCopier([pool.layered]) as copier:
        copier.load([[0]], [1]).settled.result(TIMEOUT_S)

    assert same(expected_page(pool, 0), pool.device_page(1))


def test_tensors_of_another_shape_are_refused() -> None:
    pool = make_pool(MHA)
    keys, values = pool.planes
    short = [tensor[:-1] for tensor in values]

    for planes, message in (
        ([keys], "2 planes of 3 layers, but the tensors given are \\[3\\]"),
        ([keys, values[:2]], "are \\[3, 2\\] per plane"),
        ([[key[:3] for key in keys], values], "3 tokens are less than a page, which has 4"),
        ([keys, short], "layer 0 is \\(19, 2, 8\\) on cpu, but .* needs \\(20, 2, 8\\)"),
        ([keys, [value[:, :1] for value in values]], "layer 0 is \\(20, 1, 8\\)"),
        ([[key.float() for key in keys], values], "torch.float32, but the host pool is bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            LayeredPool(pool.host, planes)


def test_other_devices_are_refused() -> None:
    pool = make_pool(MHA)
    planes = [[tensor.to("meta") for tensor in plane] for plane in pool.planes]

    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="on the CPU or on CUDA, not on meta"):
        LayerCopier([LayeredPool(pool.host, planes)])

    assert not set(threading.enumerate()) - before
