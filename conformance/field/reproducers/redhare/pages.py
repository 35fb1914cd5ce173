"""What Redhare's store does with two clients: pages.py REDIS_URL."""

import ctypes, sys

from redhare import KvStore


def client(name):
    place = {"data_plane_addr": "127.0.0.1:0", "cluster": "c", "transport": "tcp"}
    return KvStore(redis_url=sys.argv[1], client_id=name, capacity=64 << 20, **place)


def memory(data):
    kept.append(ctypes.create_string_buffer(data, len(data)))
    return [[ctypes.addressof(kept[-1])]], [[len(data)]]


kept, first, second = [], client("first"), client("second")
first.batch_put_from_multi_buffers(["page"], *memory(b"old " * 256))
second.remove("page")
stays = first.batch_get_into_multi_buffers(["page"], *memory(bytes(1024))) == [0]
print("KV-007 KV-502: a page that another client removed is a hit:", stays)
long = first.batch_get_into_multi_buffers(["page"], *memory(b"\7" * 2048)) == [0]
print("KV-003: a get of twice the size is a hit:", long)
first.close()
second.close()
