"""What servers with SGLang's `hf3fs` do to each other, and when they end: server.py FOLDER."""

import gc, signal, sys, weakref

import torch
from sglang.srt.mem_cache.storage.hf3fs.mini_3fs_metadata_server import Hf3fsLocalMetadataClient
from sglang.srt.mem_cache.storage.hf3fs.storage_hf3fs import HiCacheHF3FS

path, one, handler = f"{sys.argv[1]}/pages", torch.arange(1), signal.getsignal(signal.SIGTERM)


class Pool:  # pages of one slot; the file has four
    layout, page_size, rows = "layer_first", 1, torch.ones(9, 64, dtype=torch.uint8)
    get_data_page = lambda self, index, flat: self.rows[int(index)]
    get_dummy_flat_data_page = lambda self: torch.zeros(64, dtype=torch.uint8)
    set_from_flat_data_page = lambda self, index, page: self.rows[int(index)].copy_(page)


def server():
    place = (path, 256, 1, 64, 8, 5, torch.uint8, Hf3fsLocalMetadataClient())
    store = HiCacheHF3FS(0, *place, use_mock_client=True)
    store.register_mem_pool_host(Pool())
    return store


first, second = server(), server()
first.batch_set_v1(["aa"], one)
Pool.rows[0] = 3
second.batch_set_v1(["bb"], one)
other = first.batch_get_v1(["aa"], one + 8) == [True] and int(Pool.rows[8, 0]) == 3
rules = "KV-003 KV-101 KV-103 KV-105"
print(f"{rules}: a server gets another's page, which has the same slot of the file:", other)
taken = signal.getsignal(signal.SIGTERM) is not handler
print("KV-306: it replaces the handler of SIGTERM:", taken)
ref, first = weakref.ref(first.close() or first), None
gc.collect()
print("KV-302: a store that was closed stays in memory until the process ends:", ref() is not None)
