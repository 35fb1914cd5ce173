"""Whether a server with another memory layout has other keys in Redhare: layout.py."""

import os

import torch
from redhare.vllm_connector.data import build_layout_namespace
from vllm.v1.kv_cache_interface import FullAttentionSpec


def namespace(layout):
    os.environ["VLLM_KV_CACHE_LAYOUT"] = layout
    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    model = {"model_id": "m", "revision": "main", "dtype": "bfloat16", "layer_names": ["l"]}
    sizes = {"segment_lengths": [65536], "chunk_size": 16, "group_block_size": 16}
    return build_layout_namespace(cache_spec=spec, full_block_only=[False], **model, **sizes)


print("KV-101: servers with NHD and HND have one namespace:", namespace("NHD") == namespace("HND"))
