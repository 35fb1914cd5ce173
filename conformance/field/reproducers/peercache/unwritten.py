"""Who reads a page of PeerCache whose writer ended before it wrote: unwritten.py PORT."""

import os, sys, time

import torch
from peercache.rpc import RpcClientPool
from peercache.store import PeerCacheStore

HOSTS = ("local_hostname", "rdma_bind_host", "control_bind_host", "meta_bind_host")
EXTRA = dict.fromkeys(HOSTS, "127.0.0.1") | {"metrics_enabled": False, "disk_enabled": False}
EXTRA |= {"discovery_addr": f"127.0.0.1:{sys.argv[1]}", "mode": "centralized", "role": "inference"}


class Pool:
    kv_buffer = torch.ones(1000, dtype=torch.uint8)

    def get_page_buffer_meta(self, _):
        return [self.kv_buffer.data_ptr(), self.kv_buffer.data_ptr() + 500], [500, 500]


rpc, store = RpcClientPool(), PeerCacheStore(None, EXTRA | {"protocol": "tcp"})
store.register_mem_pool_host(Pool())
members = rpc.call(EXTRA["discovery_addr"], "members")["members"]
port = next(one["control_port"] for one in members if one["role"] == "storage")
parts = [{"key": f"hash_0_{part}", "length": 500} for part in "kv"]
rpc.call(f"127.0.0.1:{port}", "data_prepare_writes", {"pages": parts})  # and no more, as if killed
PeerCacheStore(None, EXTRA | {"protocol": "tcp"})  # another node joins
time.sleep(5)  # until all know of it
hit = store.batch_get_v1(["hash"], None) == [True]
print("KV-402: a page that was never written is a hit after another node joined:", hit)
os._exit(sys.stdout.flush() or 0)
