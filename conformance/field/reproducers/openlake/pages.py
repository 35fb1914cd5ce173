"""Who shares a page of OpenLake's daemon, and what a get of it returns: pages.py HOST:PORT."""

import ctypes
import sys

from openlake_client import Client

client = Client(device="local", client_id=2048)
client.attach(sys.argv[1], 0, 54 + 4096)


def memory(data):
    kept.append(ctypes.create_string_buffer(data, len(data)))
    return [[ctypes.addressof(kept[-1])]], [[len(data)]]


kept, key = [], b"hash of the block".ljust(32) + b"hash of name" + bytes(10)
client.put_batch([key], *memory(b"bfloat16" * 128))
hit = client.get_batch([key], *memory(bytes(1024))) == [0]
print("KV-106: a key has the rank, not how many there are, so rank 0 of 4 gets rank 0 of 2:", hit)
print("KV-001 KV-101: a key is block hash, model, group and ranks, so fp16 gets bf16:", hit)
long = client.get_batch([key], *memory(b"\7" * 2048)) == [0] and kept[-1].raw[1024:] != b"\7" * 1024
print("KV-003 KV-008: a get of twice the size is a hit, with other memory behind it:", long)
