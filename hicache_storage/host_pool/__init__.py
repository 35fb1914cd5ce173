"""L2: pages in host memory, in an engine's layout.

A pool holds one array for each plane (K and V, or the one latent of MLA). The shapes are those of SGLang
0.5.23 (pool_host/mha.py, mla.py), for S slots of P tokens, L layers, H heads and D dims:

    layout             array of a plane   bytes of its page    segments of a page
    layer_first        (L, S*P, H, D)     (L, P, H, D)         one a plane and layer
    page_first         (S*P, L, H, D)     (P, L, H, D)         one a plane
    page_first_direct  (S, L, P, H, D)    (L, P, H, D)         one a plane
    page_head          (S, H, P, L, D)    (H, P, L, D)         one a plane

The planes follow each other in memory and in the page. Equal K and V form one array with a leading axis
of 2. A page can be cut into tiles (`tiles`); the storage stores each tile as a page of its own.
"""

from __future__ import annotations

from hicache_storage.host_pool.memory import HugePages
from hicache_storage.host_pool.pool import HostPool
from hicache_storage.host_pool.shape import LAYOUTS, PageShape
from hicache_storage.host_pool.tiles import Tile

__all__ = ["LAYOUTS", "HostPool", "HugePages", "PageShape", "Tile"]
