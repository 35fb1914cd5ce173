"""What `clear` of SGLang's `file` removes, and what killed writers leave: clear.py FOLDER."""

import multiprocessing
import os
import sys
from pathlib import Path

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

folder = Path(sys.argv[1])


def store(model):
    config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, False, model)
    return HiCacheFile(config, str(folder))


def killed():
    os.replace = lambda *_: os._exit(9)
    store("m").set("aa", torch.ones(9))


for _ in range(3):
    writer = multiprocessing.get_context("fork").Process(target=killed)
    writer.start()
    writer.join()
print("KV-402: three killed writers leave a file each, for good:", len(list(folder.iterdir())) == 3)
store("other").set("bb", torch.ones(9))
(folder / "notes.txt").write_text("not a page")
store("m").clear()
print("KV-103: `clear` of model m removes all files, also of others:", not list(folder.iterdir()))
