"""Damage and `clear` of SGLang's `seaweedfs`: damage.py ENDPOINT ACCESS_KEY SECRET_KEY."""

import sys
from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.storage.seaweedfs.seaweedfs_store import SeaweedFSStore

own = dict(zip(("endpoint", "access_key", "secret_key"), sys.argv[1:], strict=True))
config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, True, "m", extra_config=own)
store, page = SeaweedFSStore(config), torch.zeros(999, dtype=torch.uint8)
store.set("aa", page)
store._s3.put_object(Bucket="sglang-hicache", Key=store._object_key("aa"), Body=b"\3" + bytes(998))
print("KV-404: a flipped bit is a hit:", store.get("aa", page) is not None and int(page[0]) == 3)
store._s3.put_object(Bucket="sglang-hicache", Key=store._object_key("aa"), Body=bytes(998))
still = store.get("aa", page) is None and store.exists("aa")
print("KV-403: a cut page that a get has missed is still found:", still)
store.mem_pool_host = SimpleNamespace(page_size=1, get_page_buffer_meta=lambda _: ([], []))
try:
    store.batch_get_v1([], torch.arange(0))
except ZeroDivisionError:
    print("KV-201: a get of no page raises ZeroDivisionError:", True)
store.set("bb.draft", page)
store.set("cc", page[:500])
store.clear()
gone = not (store.exists("bb.draft") or store.exists("cc"))
print("KV-103: `clear` removes the pages of every pool and size of the model:", gone)
