"""Who shares a page of SGLang's `seaweedfs`: pages.py ENDPOINT ACCESS_KEY SECRET_KEY."""

import sys

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.storage.seaweedfs.seaweedfs_store import SeaweedFSStore

own = dict(zip(("endpoint", "access_key", "secret_key"), sys.argv[1:], strict=True))


def rank(model="m", tp_rank=0, mla=False):
    config = HiCacheStorageConfig(tp_rank, 2, 0, 1, 0, 1, mla, False, True, model, extra_config=own)
    return SeaweedFSStore(config)


rank().set("aa", torch.ones(500, dtype=torch.bfloat16))
there = rank().get("aa", torch.zeros(500, dtype=torch.float16)) is not None
print("KV-001 KV-101: a float16 server gets a bfloat16 server's page as a hit:", there)
half = torch.zeros(500, dtype=torch.uint8)
other = rank().exists("aa") and rank().get("aa", half) is None and rank().set("aa", half)
lost = other and rank().get("aa", torch.zeros(500, dtype=torch.bfloat16)) is None
print("KV-003 KV-008 KV-101: an fp8 server's set replaces the bfloat16 server's page:", lost)
rank("a/b-c").set("aa", half)
print("KV-105: model a-b/c has model a/b-c's page:", rank("a-b/c").exists("aa"))
rank("d", 0, mla=True).set("aa.draft", half)
draft = rank("d", 1, mla=True).exists("aa.draft")
print("KV-106: rank 1 of an MLA model has rank 0's page of a sharded draft:", draft)
