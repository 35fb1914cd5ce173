"""One pool's KV cache on the device and in host memory, seen layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.host_pool.memory import load_torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hicache_storage.host_pool import HostPool
else:
    torch = load_torch()

# Bits are moved, not numbers: not every kind of float can be copied by index, and wide words go faster.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class LayeredPool:
    """The tensors that an engine computes with, beside the host pool that their pages come from.

    Both stay the caller's, and must outlive this. Slot s of the device is tokens s * page_tokens to
    (s + 1) * page_tokens - 1 of every tensor; tokens beyond the last whole page are left alone.
    """

    def __init__(self, host: HostPool, planes: Sequence[Sequence[torch.Tensor]]) -> None:
        """Borrow tensors and host memory.

        Args:
            host: L2 of the same pool, in any layout.
            planes: For each plane of the host pool's shape (K and V, or the latent of MLA) one tensor a
                layer, [tokens, heads, dim]. Of the pool's dtype, or of another one as wide.

        Raises:
            ValueError: Tensors that do not go with each other or with the host pool's shape.
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
        """Each plane of a layer, on the device and in L2, both [slots, page_tokens, heads, words]."""
        return [plane[layer] for plane in self._planes]


def _as_words(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same memory in the widest words in which all of `tensors` can be seen."""
    for words in _WORDS:
        try:
            on_device, in_host = (tensor.view(words) for tensor in tensors)
        except RuntimeError:  # a dim or a stride that is no multiple of it
            continue
        return on_device, in_host
    raise ValueError(f"tensors of strides {[tensor.stride() for tensor in tensors]} have no pages")


def _by_layer(host: HostPool, plane: int) -> list[torch.Tensor]:
    """A plane of the host pool as one view a layer, [slots, page_tokens, heads, dim], in any layout."""
    shape = host.shape
    whole = host.tensors()[plane]
    heads, dim = shape.planes[plane]
    if host.layout == "layer_first":
        whole = whole.view(shape.layers, host.slots, shape.page_tokens, heads, dim)
        return [whole[layer] for layer in range(shape.layers)]
    if host.layout == "page_first":
        whole = whole.view(host.slots, shape.page_tokens, shape.layers, heads, dim)
        return [whole[:, :, layer] for layer in range(shape.layers)]
    if host.layout == "page_first_direct":
        return [whole[:, layer] for layer in range(shape.layers)]
    return [whole[:, :, :, layer].transpose(1, 2) for layer in range(shape.layers)]  # page_head


def _check(host: HostPool, planes: Sequence[Sequence[torch.Tensor]]) -> None:
    shape = host.shape
    counts = [len(plane) for plane in planes]
    if counts != [shape.layers] * len(shape.planes):
        raise ValueError(
            f"the host pool has {len(shape.planes)} planes of {shape.layers} layers; the tensors given"
            f" are {counts} a plane"
        )
    first = planes[0][0]
    if len(first) < shape.page_tokens:
        raise ValueError(f"{len(first)} tokens are less than a page, which has {shape.page_tokens}")
    for plane, (heads, dim) in zip(planes, shape.planes, strict=True):
        for layer, tensor in enumerate(plane):
            wanted = (len(first), heads, dim)
            if tuple(tensor.shape) != wanted or tensor.device != first.device:
                raise ValueError(
                    f"the tensor of layer {layer} is {tuple(tensor.shape)} on {tensor.device}; the host"
                    f" pool's shape wants {wanted} on {first.device}"
                )
            if tensor.element_size() != shape.itemsize:
                raise ValueError(
                    f"the tensor of layer {layer} is {tensor.dtype}, and the host pool {shape.dtype}:"
                    " they must be as wide"
                )
