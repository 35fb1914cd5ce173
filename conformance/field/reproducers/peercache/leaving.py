"""How long a closed client of PeerCache stays in its group, over its server: leaving.py PORT."""

import os, sys, time

from peercache.rpc import RpcClientPool
from peercache.store import PeerCacheStore

HOSTS = ("local_hostname", "rdma_bind_host", "control_bind_host", "meta_bind_host")
EXTRA = dict.fromkeys(HOSTS, "127.0.0.1") | {"metrics_enabled": False, "disk_enabled": False}
EXTRA |= {"discovery_addr": f"127.0.0.1:{sys.argv[1]}", "mode": "centralized", "role": "inference"}
rpc = RpcClientPool()


def is_member(node):
    members = rpc.call(EXTRA["discovery_addr"], "members")["members"]
    return node in [one["node_id"] for one in members]


store = PeerCacheStore(None, EXTRA | {"protocol": "tcp"})
store.close()
left = not is_member(store.config.node_id)
time.sleep(4)  # its thread wakes after 2 s at most
again = is_member(store.config.node_id)
print("KV-901: a closed client has left the group, and is in it again 4 s later:", left and again)
os._exit(sys.stdout.flush() or 0)
