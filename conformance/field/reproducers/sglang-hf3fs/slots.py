"""What SGLang's `hf3fs` does with damage, without room, and when closed: slots.py FOLDER."""

import sys
from pathlib import Path

import torch
from sglang.srt.mem_cache.storage.hf3fs.mini_3fs_metadata_server import Hf3fsLocalMetadataClient
from sglang.srt.mem_cache.storage.hf3fs.storage_hf3fs import HiCacheHF3FS


class Pool:  # pages of one slot; the file has four
    layout, page_size, rows = "layer_first", 1, torch.ones(9, 64, dtype=torch.uint8)
    get_data_page = lambda self, index, flat: self.rows[int(index)]
    get_dummy_flat_data_page = lambda self: torch.zeros(64, dtype=torch.uint8)
    set_from_flat_data_page = lambda self, index, page: self.rows[int(index)].copy_(page)


path = Path(sys.argv[1], "pages")
place = (str(path), 256, 1, 64, 8, 5, torch.uint8, Hf3fsLocalMetadataClient())
store = HiCacheHF3FS(0, *place, use_mock_client=True)
store.register_mem_pool_host(Pool())
store.batch_set_v1(["aa"], torch.arange(1))
path.write_bytes(path.read_bytes().replace(b"\1" * 64, b"\3" + b"\1" * 63))
hit = store.batch_get_v1(["aa"], torch.tensor([8])) == [True] and int(Pool.rows[8, 0]) == 3
print("KV-404: a flipped bit is a hit:", hit)
try:
    store.batch_set_v1(["bb", "cc", "dd", "ee", "ff"], torch.arange(5))
except KeyError:
    print("KV-006 KV-307: a set of five pages, where four have room, raises KeyError:", True)
store.clear()
store.batch_set_v1(["aa"], torch.arange(1))
store.close()
try:
    store.batch_get_v1(["aa"], torch.tensor([8]))
except RuntimeError as error:
    print(f"KV-301: a get after close raises RuntimeError ({error}):", True)
