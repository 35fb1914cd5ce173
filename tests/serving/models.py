"""Small models with random weights, made where the tests run: nothing is downloaded.

    checkpoint(TINY)    # the directory of a checkpoint, made if it is not there yet
    prompt(3, 500)      # the token ids of prompt number 3

Weights are float32, so an answer does not depend on the batch that a prompt was computed in. They are
large enough that attention decides over the next token: an engine that reads wrong KV answers otherwise.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

CACHE = Path(__file__).parents[2] / "artifacts/serving/models"
VOCABULARY = 4096
"""Each token is a word of two syllables. The first one ends a text."""
MAX_TOKENS = 16384
_STD = 0.06
_SHARPER = 2.0
"""The factor of query weights: with flat attention it hardly matters what is read."""

_QUIET = 0.25
MAX_LAYERS = 1000

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Model:
    """The shape of a model, and the seed of its weights."""

    name: str
    seed: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    window: int = 0
    """Every second layer attends only to so many tokens (Gemma 3). 0 means that none does (Llama)."""
    quiet_from: int = MAX_LAYERS
    """Layers from this one on say little, so that those before it are a good draft."""

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


TINY = Model("tiny", seed=1, layers=2, hidden=256, heads=4, kv_heads=2, inner=512)
OTHER = replace(TINY, name="other", seed=7)
"""TINY's shape with other weights."""
WINDOW = replace(TINY, name="window", seed=6, layers=4, window=256)
TARGET = replace(TINY, name="target", seed=2, layers=6, quiet_from=2)
DRAFT = replace(TARGET, name="draft", layers=2)
"""The first layers of TARGET."""
LARGE = Model("large", seed=4, layers=16, hidden=1024, heads=16, kv_heads=4, inner=2816)
"""About 190 million parameters: two cores need seconds for a prompt of some thousand tokens."""
MEDIUM = replace(LARGE, name="medium", layers=8)
"""Half of LARGE."""


def prompt(number: int, length: int) -> list[int]:
    """Return the token ids of a prompt. Prompts of different numbers have no common prefix."""
    return random.Random(f"prompt {number}").choices(range(1, VOCABULARY), k=length)


def words(tokens: list[int]) -> str:
    """Return the text of these tokens."""
    return " ".join(_words()[token] for token in tokens)


def checkpoint(model: Model) -> Path:
    """Return the directory of a checkpoint with tokenizer in Hugging Face's format, made once."""

    def write(directory: Path) -> None:
        (directory / "config.json").write_text(json.dumps(_config(model), indent=1))
        _save(directory / "model.safetensors", dict(_weights(model)))
        _write_tokenizer(directory)

    return _made_once(model.name, asdict(model), write)


def lora(model: Model, seed: int = 5, rank: int = 8) -> Path:
    """Return the directory of a LoRA adapter for `model` in PEFT's format, made once."""
    targets = ("q_proj", "v_proj")

    def write(directory: Path) -> None:
        generator = np.random.default_rng(seed)
        tensors: dict[str, Array] = {}
        for name, shape in _shapes(model):
            if name.split(".")[-2] in targets:
                layer = f"base_model.model.{name.removesuffix('.weight')}"
                tensors[f"{layer}.lora_A.weight"] = _normal(generator, (rank, shape[1]), 0.2)
                tensors[f"{layer}.lora_B.weight"] = _normal(generator, (shape[0], rank), 0.2)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": model.name,
            "r": rank,
            "lora_alpha": rank,
            "target_modules": list(targets),
            "bias": "none",
        }
        (directory / "adapter_config.json").write_text(json.dumps(config, indent=1))
        _save(directory / "adapter_model.safetensors", tensors)

    return _made_once(f"{model.name}-lora", {**asdict(model), "lora": [seed, rank]}, write)


def _made_once(name: str, definition: dict[str, Any], write: Callable[[Path], None]) -> Path:
    """Return a directory of the cache. Two processes may make it at the same time."""
    source = Path(__file__).read_bytes() + json.dumps(definition).encode()
    directory = CACHE / f"{name}-{hashlib.sha256(source).hexdigest()[:12]}"
    if not directory.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=CACHE, prefix=f".{name}-"))
        try:
            write(scratch)
            scratch.rename(directory)
        except OSError:
            if not directory.exists():
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return directory


def _config(model: Model) -> dict[str, Any]:
    shared = {
        "vocab_size": VOCABULARY,
        "hidden_size": model.hidden,
        "intermediate_size": model.inner,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": MAX_TOKENS,
        "tie_word_embeddings": bool(model.window),
        "rms_norm_eps": 1e-6,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }
    if not model.window:
        more = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
        return {**shared, **more, "rope_theta": 10000.0}
    return {
        **shared,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": model.head_dim,
        "sliding_window": model.window,
        "layer_types": [
            "full_attention" if number % 2 else "sliding_attention"
            for number in range(model.layers)
        ],
    }


def _shapes(model: Model) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = model.hidden, model.inner
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    yield "model.embed_tokens.weight", (VOCABULARY, hidden)
    for number in range(model.layers):
        layer = f"model.layers.{number}"
        yield f"{layer}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        if model.window:
            yield f"{layer}.pre_feedforward_layernorm.weight", (hidden,)
            yield f"{layer}.post_feedforward_layernorm.weight", (hidden,)
            yield f"{layer}.self_attn.q_norm.weight", (model.head_dim,)
            yield f"{layer}.self_attn.k_norm.weight", (model.head_dim,)
    yield "model.norm.weight", (hidden,)
    if not model.window:
        yield "lm_head.weight", (VOCABULARY, hidden)


def _weights(model: Model) -> Iterator[tuple[str, Array]]:
    """Yield all tensors. One has the same values in every model of the same seed that has it."""
    for name, shape in _shapes(model):
        if len(shape) == 1:  # Gemma adds 1 to the weights of its norms
            yield name, np.full(shape, 0.0 if model.window else 1.0, np.float32)
            continue
        digest = hashlib.sha256(f"{model.seed} {name}".encode()).digest()
        weights = _normal(np.random.default_rng(list(digest)), shape, _STD)
        kind = name.split(".")[-2]
        if kind == "q_proj":
            weights *= _SHARPER
        if kind in ("o_proj", "down_proj") and int(name.split(".")[2]) >= model.quiet_from:
            weights *= _QUIET
        yield name, weights


def _normal(generator: np.random.Generator, shape: tuple[int, ...], std: float) -> Array:
    return generator.standard_normal(shape, dtype=np.float32) * np.float32(std)


def _save(path: Path, tensors: dict[str, Array]) -> None:
    safetensors: Any = importlib.import_module("safetensors.numpy")
    safetensors.save_file(tensors, path, metadata={"format": "pt"})


def _words() -> list[str]:
    syllables = ["".join(pair) for pair in itertools.product("bdfghklmnprstvwz", "aiou")]
    return ["<end>", *map("".join, itertools.product(syllables, repeat=2))][:VOCABULARY]


def _write_tokenizer(directory: Path) -> None:
    vocabulary = {word: number for number, word in enumerate(_words())}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 0,
                "content": "<end>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<end>"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<end>",
                "pad_token": "<end>",
                "unk_token": "<end>",
                "model_max_length": MAX_TOKENS,
            }
        )
    )
