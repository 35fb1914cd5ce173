"""Who shares a page of SGLang's `nixl` over files: keys.py FOLDER."""

import sys

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

own = {"plugin": {"posix": {"active": True}}, "use_direct_io": False, "l3_cleaner_enabled": False}
first = torch.zeros(1, dtype=torch.int64)


class Pool:
    """A host pool with one page, whose K and V have `half` bytes each."""

    layout, page_size, pin_memory = "page_first", 1, False

    def __init__(self, half, fill):
        self.half, self.kv_buffer = half, torch.full((2 * half,), fill, dtype=torch.uint8)

    def get_page_buffer_meta(self, _):
        return [self.kv_buffer.data_ptr(), self.kv_buffer.data_ptr() + self.half], [self.half] * 2


def run(verb, model="m", pp=0, half=512, fill=0):
    config = HiCacheStorageConfig(0, 1, pp, 2, 0, 1, False, False, True, model, extra_config=own)
    store, pool = HiCacheNixl(config, sys.argv[1]), Pool(half, fill)
    store.register_mem_pool_host(pool)
    hit = getattr(store, f"batch_{verb}_v1")(["aa"], first) == [True]
    return hit and pool.kv_buffer[[0, half - 1]].tolist()


run("set", fill=1)
print("KV-106: stage 1 of 2 gets the page of stage 0:", run("get", pp=1) == [1, 1])
run("set", half=256, fill=2)
rules = "KV-001 KV-003 KV-008 KV-101"
print(f"{rules}: after an fp8 server's set, bf16 gets half of each page:", run("get") == [2, 1])
run("set", "a/b-c")
print("KV-105: model a-b/c has model a/b-c's page:", bool(run("get", "a-b/c")))
print("KV-105: a model name of 250 characters stores nothing:", not run("set", "m" * 250))
