"""View one pool's KV cache layer by layer, on the device and in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.host_pool.memory import load_torch
from hicache_storage.host_pool.shape import POOL_AXES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hicache_storage.host_pool import HostPool
else:
    torch = load_torch()

# Pages are copied as integers, because torch cannot copy every float type by index. Wide words are
# faster.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class LayeredPool:
    """An engine's tensors, together with the host pool for the same pages.

    The caller owns both, and must keep them alive for as long as this object. Slot s on the device
    covers the tokens s * page_tokens to (s + 1) * page_tokens - 1 of every tensor. Tokens after the last
    full page are not used.
    """

    def __init__(self, host: HostPool, planes: Sequence[Sequence[torch.Tensor]]) -> None:
        """Borrow the tensors and the host memory.

        Args:
            host: The L2 of the same pool, in any layout.
            planes: For each plane of the host pool's shape (K and V, or the latent of MLA), one tensor
                for each layer, [tokens, heads, dim]. Its dtype is as wide as the pool's dtype.

        Raises:
            ValueError: The tensors do not match each other or the host pool's shape.
        """
        self.host = host
        self.page_tokens: int = host.shape.page_tokens
        self.layers: int = host.shape.layers
        self.device: torch.device = (
            planes[0][0].device if planes and planes[0] else torch.device("cpu")
        )
        _check(host, planes)
        self.slots: int = len(planes[0][0]) // self.page_tokens
        end = self.slots * self.page_tokens
        self._planes = [
            [
                _as_words(tensor[:end].view(self.slots, self.page_tokens, *tensor.shape[1:]), rows)
                for tensor, rows in zip(plane, _by_layer(host, number), strict=True)
            ]
            for number, plane in enumerate(planes)
        ]

    def planes(self, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each plane of a layer, on the device and in L2: [slots, page_tokens, heads, words]."""
        return [plane[layer] for plane in self._planes]


def _as_words(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two tensors as views of the widest integers that both support."""
    for words in _WORDS:
        try:
            on_device, in_host = (tensor.view(words) for tensor in tensors)
        except RuntimeError:  # a dim or a stride is not a multiple of the width
            continue
        return on_device, in_host
    strides = [tensor.stride() for tensor in tensors]
    raise ValueError(
        f"tensors with strides {strides} cannot be copied: make their last dim contiguous"
    )


def _by_layer(host: HostPool, plane: int) -> list[torch.Tensor]:
    """Return a view of each layer in a host plane, [slots, page_tokens, heads, dim]."""
    shape = host.shape
    heads, dim = shape.planes[plane]
    sizes = {"s": host.slots, "t": shape.page_tokens, "l": shape.layers, "h": heads, "d": dim}
    axes = POOL_AXES[host.layout].replace("n", "st")
    array = host.tensors()[plane].view([sizes[axis] for axis in axes])
    return list(array.permute([axes.index(axis) for axis in "lsthd"]))


def _check(host: HostPool, planes: Sequence[Sequence[torch.Tensor]]) -> None:
    shape = host.shape
    counts = [len(plane) for plane in planes]
    if counts != [shape.layers] * len(shape.planes):
        raise ValueError(
            f"the host pool has {len(shape.planes)} planes of {shape.layers} layers, but the"
            f" tensors given are {counts} per plane"
        )
    first = planes[0][0]
    if len(first) < shape.page_tokens:
        raise ValueError(f"{len(first)} tokens are less than a page, which has {shape.page_tokens}")
    for plane, (heads, dim) in zip(planes, shape.planes, strict=True):
        for layer, tensor in enumerate(plane):
            wanted = (len(first), heads, dim)
            if tuple(tensor.shape) != wanted or tensor.device != first.device:
                raise ValueError(
                    f"the tensor of layer {layer} is {tuple(tensor.shape)} on {tensor.device},"
                    f" but the host pool's shape needs {wanted} on {first.device}"
                )
            if tensor.element_size() != shape.itemsize:
                raise ValueError(
                    f"the tensor of layer {layer} is {tensor.dtype}, but the host pool"
                    f" is {shape.dtype}: both must be equally wide"
                )
