"""L1: pages in device memory, inside the engine's own tensors, and transfers between L1 and L2.

An engine keeps the KV cache of a pool in one tensor for each plane and layer, [tokens, heads, dim]. A
token index is valid in all of these tensors, and a slot covers the token indices of one page. A slot
holds the same page in every pool, because target and draft are allocated, freed and moved together.
"""

from __future__ import annotations

from hicache_storage.device_pool.copier import LayerCopier
from hicache_storage.device_pool.pool import DevicePool
from hicache_storage.device_pool.tensors import LayeredPool
from hicache_storage.device_pool.transfer import LayerTransfer, LayerTransferFailed

__all__ = ["DevicePool", "LayerCopier", "LayerTransfer", "LayerTransferFailed", "LayeredPool"]
