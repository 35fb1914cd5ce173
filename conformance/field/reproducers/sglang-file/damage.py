"""What SGLang's `file` backend does with damage, and with a full table: damage.py FOLDER."""

import resource
import sys
from pathlib import Path

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

store = HiCacheFile(HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, False, "m"), sys.argv[1])
good, page = torch.ones(999, dtype=torch.uint8), torch.zeros(999, dtype=torch.uint8)
store.batch_set(["aa", "bb"], [good, good])
first = next(Path(sys.argv[1]).glob("aa*"))
first.write_bytes(b"\3" + first.read_bytes()[1:])
print("KV-404: a flipped bit is a hit:", store.get("aa", page) is not None and int(page[0]) == 3)
first.write_bytes(first.read_bytes()[:500])
try:
    store.batch_get(["aa", "bb"], [page, page])
except OSError as error:
    print(f"KV-003 KV-008 KV-202 KV-403: a short file fails its batch ({str(error)[:10]}):", True)
healed = store.set("aa", good) and first.stat().st_size == 999
print("KV-403: a set returns True and does not heal it:", not healed)
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
try:
    store.get("bb", page)
except OSError as error:
    print(f"KV-307: a get without a free descriptor raises ({error.strerror}):", True)
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
