"""Who shares a page of SGLang's `mooncake`: keys.py '{"master_server_address": ...}'."""

import json, sys

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

before = open("/proc/self/status").read().partition("SigCgt:")[2][:18]
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore


class Pool:  # a host pool with one page, whose K and V have `half` bytes each
    layout, page_size = "page_first", 1

    def __init__(self, half, fill):
        self.half, self.kv_buffer = half, torch.full((2 * half,), fill, dtype=torch.uint8)

    def get_page_buffer_meta(self, _):
        return [self.kv_buffer.data_ptr(), self.kv_buffer.data_ptr() + self.half], [self.half] * 2

    def get_ksize_per_token(self):
        return self.half


def run(verb, model="m", tp=2, half=512, fill=0):
    place = (0, tp, 0, 1, 0, 1, False, False, True, model)
    store = MooncakeStore(HiCacheStorageConfig(*place, extra_config=json.loads(sys.argv[1])))
    store.register_mem_pool_host(pool := Pool(half, fill))
    hit = getattr(store, f"batch_{verb}_v1")(["aa"], torch.arange(1)) == [True]
    return hit and pool.kv_buffer[[0, half - 1]].tolist()


run("set", fill=1)
now = open("/proc/self/status").read().partition("SigCgt:")[2][:18]
print("KV-306: it replaces handlers of signals:", now != before)
print("KV-106: rank 0 of 4 gets rank 0 of 2's page:", run("get", tp=4) == [1, 1])
rules, wrong = "KV-001 KV-003 KV-008 KV-101 KV-403", run("get", half=1024, fill=9) == [1, 9]
print(f"{rules}: a bf16 server's hit is half an fp8 server's page, half old memory:", wrong)
run("set", "a/b-c")
print("KV-105: model a-b/c has model a/b-c's page:", bool(run("get", "a-b/c")))
