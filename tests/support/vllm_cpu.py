"""Replaces what needs a GPU, so that vLLM's Python files run on any machine. Import it before vLLM.

1. The platform is vLLM's unspecified one, even if there is a GPU. It supports several KV cache
   groups, as CUDA's does.
2. `ModelConfig` inspects the model's own file in a subprocess, which needs CUDA's kernels. Here every
   architecture is a plain decoder.

Don't install torchvision: transformers would import it, and its build for CUDA breaks without CUDA.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import sys
from typing import Any

_TRUE = {"is_text_generation_model": True, "supports_pp": True, "supports_lora": True}
_NAMED = {
    "attn_type": "decoder",
    "default_seq_pooling_type": "LAST",
    "default_tok_pooling_type": "ALL",
    "score_type": "bi-encoder",
    "supported_video_pruning_methods": (),
}


def stand_in() -> None:
    """Install all replacements. A second call does nothing."""
    if "vllm" in sys.modules:
        return
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    platforms: Any = importlib.import_module("vllm.platforms")
    interface: Any = importlib.import_module("vllm.platforms.interface")
    interface.UnspecifiedPlatform.support_hybrid_kv_cache = classmethod(lambda cls: True)
    platforms._current_platform = interface.UnspecifiedPlatform()
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")

    def plain_decoder(model: Any) -> Any:
        fields = {field.name: False for field in dataclasses.fields(registry._ModelInfo)}
        named = {**_TRUE, **_NAMED, "architecture": model.class_name}
        known = {name: value for name, value in named.items() if name in fields}
        return registry._ModelInfo(**{**fields, **known})

    registry._LazyRegisteredModel.inspect_model_cls = plain_decoder
