"""Who shares a page of PeerCache, over its storage server on this machine: pages.py PORT."""

import os, sys, time
from types import SimpleNamespace as Any

import torch
from peercache.store import PeerCacheStore

HOSTS = ("local_hostname", "rdma_bind_host", "control_bind_host", "meta_bind_host")
EXTRA = dict.fromkeys(HOSTS, "127.0.0.1") | {"metrics_enabled": False, "disk_enabled": False}
EXTRA |= {"discovery_addr": f"127.0.0.1:{sys.argv[1]}", "mode": "centralized", "role": "inference"}


class Rank:
    def __init__(self, model, tp_size, nbytes=500):
        config = Any(model_name=model, tp_rank=0, tp_size=tp_size, is_mla_model=False)
        config.extra_config, config.pp_size, config.pp_rank = EXTRA | {"protocol": "tcp"}, 1, 0
        self.kv_buffer, self.nbytes = torch.zeros(2 * nbytes, dtype=torch.uint8), nbytes
        self.store = PeerCacheStore(config)
        self.store.register_mem_pool_host(self)

    def get_page_buffer_meta(self, _):
        start = self.kv_buffer.data_ptr()
        return [start, start + self.nbytes], [self.nbytes] * 2


first, other, small = Rank("a", 2), Rank("b", 4), Rank("a", 2, nbytes=250)
time.sleep(5)  # until all know of each other
first.kv_buffer.fill_(3)
first.store.batch_set_v1(["hash"], None)
hit = other.store.batch_get_v1(["hash"], None) == [True] and int(other.kv_buffer[0]) == 3
print("KV-001 KV-101 KV-105: model b gets model a's page of the same hash:", hit)
print("KV-106: rank 0 of 4 gets the page of rank 0 of 2:", hit)
half = small.store.batch_exists(["hash"]) == 1
print("KV-003: a server whose pages have half the size finds it:", half)
lost = small.store.batch_set_v1(["hash"], None) != small.store.batch_get_v1(["hash"], None)
print("KV-003 KV-008 KV-403: its set is True and stores nothing, so it never gets it:", lost)
os._exit(sys.stdout.flush() or 0)
