"""L1: pages in device memory, in the engine's own tensors, and their way to and from L2.

An engine keeps the KV cache of a pool in one tensor a plane and layer, [tokens, heads, dim], and finds a
token in all of them by one number. A slot is a page's worth of such numbers, and means the same page in
every pool: target and draft are allocated, freed and moved together.
"""

from __future__ import annotations

from hicache_storage.device_pool.copier import LayerCopier
from hicache_storage.device_pool.pool import DevicePool
from hicache_storage.device_pool.tensors import LayeredPool
from hicache_storage.device_pool.transfer import LayerTransfer, LayerTransferFailed

__all__ = ["DevicePool", "LayerCopier", "LayerTransfer", "LayerTransferFailed", "LayeredPool"]
