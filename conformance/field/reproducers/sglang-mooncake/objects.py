"""What SGLang's `mooncake` does with its objects: objects.py '{"master_server_address": ...}'."""

import json, sys

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore

own, rows = json.loads(sys.argv[1]), torch.full((4, 1024), 7, dtype=torch.uint8)


class Pool:  # four pages of one buffer each, as in MLA
    layout, page_size, kv_buffer = "page_first", 1, rows
    get_page_buffer_meta = lambda self, at: ([rows[i].data_ptr() for i in at], [1024] * len(at))
    get_ksize_per_token = lambda self: 1024


place = (0, 1, 0, 1, 0, 1, True, False, True, "m")
store = MooncakeStore(HiCacheStorageConfig(*place, extra_config=own))
store.register_mem_pool_host(Pool())
two, four = torch.arange(2), torch.arange(4)
store.batch_set_v1(["aa", "bb"], two)
rows[:] = 0
hits = store.batch_get_v1(["aa", "bb", "aa", "bb"], four) == [True] * 4 and int(rows[0, 0]) == 0
print("KV-203: a page twice in a batch: both are hits, one is not read:", hits)
try:
    store.batch_get_v1([], torch.arange(0))
except AssertionError:
    print("KV-201: a get of no page raises AssertionError:", True)
store.store.put("m_cc__k", b"\3" + bytes(9))
damaged = store.batch_get_v1(["cc"], two[:1]) == [True] and int(rows[0, 0]) == 3
print("KV-403 KV-404: an object of ten wrong bytes is a hit:", damaged)
stays = store.batch_set_v1(["cc"], two[:1]) == [True] and len(store.store.get("m_cc__k")) == 10
print("KV-403: a set of it returns True and does not heal it:", stays)
store.store.put("other", b"program")
store.clear()
print("KV-103: `clear` removes other programs' objects:", store.store.is_exist("other") == 0)
