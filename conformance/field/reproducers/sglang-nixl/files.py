"""What SGLang's `nixl` does with its files: files.py FOLDER."""

import sys
from pathlib import Path

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

own = {"plugin": {"posix": {"active": True}}, "use_direct_io": False, "l3_cleaner_enabled": False}
folder, rows = Path(sys.argv[1]), torch.full((3, 1024), 7, dtype=torch.uint8)


class Pool:  # three pages of one buffer each, as in MLA
    layout, page_size, pin_memory, kv_buffer = "page_first", 1, False, rows

    def get_page_buffer_meta(self, indices):
        return [rows[i].data_ptr() for i in indices.tolist()], [1024] * len(indices)


config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, True, False, True, "m", extra_config=own)
store = HiCacheNixl(config, str(folder))
store.register_mem_pool_host(Pool())
one, three = torch.arange(1), torch.arange(3)
store.batch_set_v1(["aa", "cc"], torch.tensor([0, 2]))
lost = store.batch_get_v1(["aa", "bb", "cc"], three) == [False] * 3
print("KV-002 KV-201 KV-202 KV-203 KV-403: one absent page makes all three misses:", lost)
path = next(folder.rglob("aa_*"))
path.write_bytes(b"\3" + bytes(2047))
longer = store.batch_get_v1(["aa"], one) == [True]
print("KV-404: a flipped bit is a hit:", longer and int(rows[0, 0]) == 3)
print("KV-003 KV-403: the first half of a longer file is a hit:", longer)
