"""What a full pool of PeerCache's storage server does with a page of another size: sizes.py."""

import ctypes

from peercache.pool import PublishedPool

memory, page, evicted = ctypes.create_string_buffer(1 << 20), ctypes.create_string_buffer(8192), []
pool = PublishedPool(ctypes.addressof(memory), 1 << 20, 0, on_evict=evicted.extend)
for number in range(256):
    pool.publish(f"small {number}", ctypes.addressof(page), 4096)
refused = pool.publish("large", ctypes.addressof(page), 8192) is None
lost = refused and len(evicted) == 256
print("KV-009 KV-307: a page twice as large empties a full pool, and is refused:", lost)
