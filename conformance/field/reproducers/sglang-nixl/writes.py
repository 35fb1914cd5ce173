"""What writers of SGLang's `nixl` leave in its files: writes.py FOLDER."""

import resource, signal, sys
from pathlib import Path

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

own = {"plugin": {"posix": {"active": True}}, "use_direct_io": False, "l3_cleaner_enabled": False}
folder, memory = Path(sys.argv[1]), torch.full((1024,), 7, dtype=torch.uint8)


class Pool:  # one page in one buffer, as in MLA
    layout, page_size, pin_memory, kv_buffer = "page_first", 1, False, memory

    def get_page_buffer_meta(self, _):
        return [memory.data_ptr()], [1024]


config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, True, False, True, "m", extra_config=own)
store, first = HiCacheNixl(config, str(folder)), torch.zeros(1, dtype=torch.int64)
store.register_mem_pool_host(Pool())
store.batch_set_v1(["aa"], first)
memory[:] = 9
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
failed = store.batch_set_v1(["aa"], first) == store.batch_set_v1(["bb"], first) == [False]
shown = failed and store.exists("bb")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("KV-006 KV-307: a set that had no room is False, and its page exists:", shown)
mixed = store.batch_get_v1(["aa"], first) == [True] and memory[[0, -1]].tolist() == [9, 7]
rules = "KV-402 KV-501 KV-502"
print(f"{rules}: a write that ends early leaves new and old bytes as a hit:", mixed)
notes = folder / "notes.txt"
notes.write_text("not a page")
store.clear()
print("KV-103: `clear` removes every file below its folder:", not notes.exists())
