"""Who shares a page of SGLang's `file` backend: keys.py FOLDER."""

import sys

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

HASH = "ab" * 32


def rank(model="m", tp_rank=0, mla=False):
    config = HiCacheStorageConfig(tp_rank, 2, 0, 1, 0, 1, mla, False, False, model)
    return HiCacheFile(config, sys.argv[1])


rank().set(HASH, torch.ones(500, dtype=torch.bfloat16))
there = rank().get(HASH, torch.zeros(500, dtype=torch.float16)) is not None
print("KV-001 KV-101: a float16 server gets a bfloat16 server's page as a hit:", there)
half = rank().get(HASH, torch.zeros(500, dtype=torch.uint8)) is not None
print("KV-003 KV-008: an fp8 server gets half of the same page as a hit:", half)
rank("a/b-c").set(HASH, torch.ones(9))
print("KV-105: model a-b/c has model a/b-c's page:", rank("a-b/c").exists(HASH))
stored = rank("m" * 200).set(HASH, torch.ones(9))
print("KV-105: a model name of 200 characters stores nothing:", not stored)
rank("d", 0, mla=True).set(f"{HASH}.draft", torch.zeros(9))
draft = rank("d", 1, mla=True).exists(f"{HASH}.draft")
print("KV-106: rank 1 of an MLA model has rank 0's page of a sharded draft:", draft)
