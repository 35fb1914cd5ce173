"""What SGLang's `hf3fs` does with holes and pools, over its mock client: pages.py FOLDER."""

import sys

import torch
from sglang.srt.mem_cache.hicache_storage import PoolTransfer
from sglang.srt.mem_cache.storage.hf3fs.mini_3fs_metadata_server import Hf3fsLocalMetadataClient
from sglang.srt.mem_cache.storage.hf3fs.storage_hf3fs import HiCacheHF3FS


class Pool:  # K and V of a page, 64 bytes each, in two slots of the file
    layout, page_size, rows = "page_first", 1, torch.zeros(9, 2, 64, dtype=torch.uint8)

    def get_data_page(self, index, flat):
        return self.rows[int(index)].view((-1,) if flat else (2, -1))

    def get_ksize_per_token(self):
        return 64


options = {"is_page_first_layout": True, "use_mock_client": True}
place = (f"{sys.argv[1]}/pages", 512, 1, 64, 8, 5, torch.uint8, Hf3fsLocalMetadataClient())
store = HiCacheHF3FS(0, *place, **options)
store.register_mem_pool_host(Pool())
Pool.rows[:2] = torch.tensor([1, 3])[:, None, None]
flags = store.batch_set_v1(["aa", "cc"], torch.arange(2))
print("KV-201: a set of two pages returns four flags:", len(flags) == 4)
found = store.batch_get_v1(["aa", "bb", "cc"], torch.tensor([3, 4, 5]))
hole = found == [True, False, True] and Pool.rows[3:6, 0, 0].tolist() == [1, 3, 0]
rules = "KV-002 KV-003 KV-004 KV-201 KV-202 KV-203 KV-501 KV-503"
print(f"{rules}: behind a miss, the page of a hit lies in the memory of the miss:", hole)
store.register_mem_host_pool_v2(Pool(), "draft")
draft = PoolTransfer(name="draft", host_indices=torch.arange(1), keys=["aa"])
refused = store.batch_set_v2([draft]) == {"draft": [False]}
print("KV-102: a page of a draft pool, which has K and V, is never stored:", refused)
