"""Show what speculative decoding loses when the draft model's KV cache is gone.

A target and a draft model answer a question about a document that they have read.
The document's KV cache is in one of these states:

1. It was never evicted.
2. Target and draft were restored from storage.
3. Storage lost the draft's pages, so only the target was restored.
4. Storage lost them, too, but the draft model computed its part again.

Each time the answer is the target's own. What changes is how many tokens a step of the
target yields.
"""

from __future__ import annotations

import random
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import torch
from hicache_storage import KeySpace, Shard, open_storage, page_hashes
from hicache_storage.controller import (
    CacheController,
    CachePool,
    ControllerSettings,
    PartialHits,
    PrefetchPolicy,
)
from hicache_storage.device_pool import DevicePool, LayeredPool
from hicache_storage.host_pool import HostPool, PageShape
from hicache_storage.page_store import PageStore
from torch.nn.functional import gelu

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.device_pool import LayerTransfer

PAGE_TOKENS = 16
DOCUMENT_PAGES = 20
ANSWER_TOKENS = 96
DRAFTED_TOKENS = 4
L1_PAGES = 32
VOCABULARY, WIDTH, HEADS = 512, 64, 2
SHARPNESS = 20.0


class Transformer:
    """A causal transformer. Its input is each token and the `context` tokens before it.

    The weights are seeded, not trained. A head attends to an earlier occurrence of the
    last `context` tokens and copies the token after it, so the model repeats passages
    of its prompt.
    """

    def __init__(self, *, layers: int, context: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.layers, self.context = layers, context
        self.head_dim = context * WIDTH // HEADS
        self._embedding = torch.nn.functional.normalize(
            torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(0))
        )
        wide, span = (context + 2) * WIDTH, context * WIDTH
        self._queries = torch.zeros(layers, wide, span)
        self._keys = torch.zeros(layers, wide, span)
        self._values = torch.zeros(layers, wide, span)
        self._outputs = torch.zeros(layers, span, wide)
        for layer in range(layers):
            match, read = (
                torch.nn.init.orthogonal_(torch.empty(span, span), generator=generator)
                for _ in range(2)
            )
            self._queries[layer, :span] = match * SHARPNESS / context
            self._keys[layer, WIDTH : WIDTH + span] = match
            self._values[layer, :WIDTH] = read[:WIDTH]
            self._outputs[layer, :, -WIDTH:] = read[:WIDTH].T
        self._up = torch.randn(layers, wide, wide, generator=generator) / wide**0.5
        self._down = (
            torch.randn(layers, wide, wide, generator=generator) / wide**0.5 * 0.05
        )

    def shape(self) -> PageShape:
        """Return the shape of a page of the KV cache."""
        return PageShape.mha(
            page_tokens=PAGE_TOKENS,
            layers=self.layers,
            heads=HEADS,
            head_dim=self.head_dim,
            dtype="float32",
        )

    def extend(self, text: Sequence[int], cache: Cache) -> list[int]:
        """Compute the part of `text` that is not in `cache`.

        Return the next token at each position.
        """
        start, rows = cache.tokens, cache.rows[: len(text)]
        x = self._embed(torch.tensor(text), start)
        later = torch.arange(len(text)) > torch.arange(start, len(text))[:, None]
        for layer in range(self.layers):
            cache.wait(layer)
            keys, values = cache.planes[0][layer], cache.planes[1][layer]
            keys[rows[start:]] = (x @ self._keys[layer]).view(-1, HEADS, self.head_dim)
            values[rows[start:]] = (x @ self._values[layer]).view(
                -1, HEADS, self.head_dim
            )
            queries = (x @ self._queries[layer]).view(-1, HEADS, self.head_dim)
            scores = torch.einsum("qhd,khd->hqk", queries, keys[rows])
            weights = scores.masked_fill(later, -torch.inf).softmax(-1)
            mixed = torch.einsum("hqk,khd->qhd", weights, values[rows]).flatten(1)
            x = x + mixed @ self._outputs[layer]
            x = x + gelu(x @ self._up[layer]) @ self._down[layer]
        cache.tokens = len(text)
        return [int(token) for token in (x[:, -WIDTH:] @ self._embedding.T).argmax(-1)]

    def _embed(self, text: torch.Tensor, start: int) -> torch.Tensor:
        padded = torch.cat([torch.zeros(self.context, dtype=torch.int64), text])
        seen = [
            padded[self.context + start - n : len(padded) - n]
            for n in range(self.context + 1)
        ]
        blocks = [self._embedding[tokens] for tokens in seen]
        return torch.cat([*blocks, torch.zeros_like(blocks[0])], dim=1)


TARGET = Transformer(layers=3, context=2, seed=1)
DRAFT = Transformer(layers=1, context=1, seed=2)
MODELS = {"kv": TARGET, "draft": DRAFT}


@dataclass(slots=True)
class Cache:
    """A model's KV cache for one text: the engine's tensors, and the tokens' rows."""

    planes: Sequence[Sequence[torch.Tensor]]
    rows: torch.Tensor
    pool: int
    loading: LayerTransfer | None = None
    tokens: int = 0
    """How many tokens are in the cache."""

    def wait(self, layer: int) -> None:
        """Wait until the layer has been loaded."""
        if self.loading is not None:
            self.loading.wait(layer, pool=self.pool)


@dataclass(slots=True)
class Answer:
    """The answer to a request, and how many tokens each step gave."""

    tokens: list[int] = field(default_factory=list[int])
    steps: list[int] = field(default_factory=list[int])
    """How many tokens each step of the target gave."""

    @property
    def acceptance_length(self) -> float:
        """Tokens per step: 1 without a draft, at most 1 more than are drafted."""
        return sum(self.steps) / len(self.steps)


class Engine:
    """Two models with their KV caches in L1, L2 and L3. L1 and L2 begin empty."""

    def __init__(self, directory: str) -> None:
        with ExitStack() as opened:
            self._storage = opened.enter_context(
                open_storage("file", {"path": directory})
            )
            store = opened.enter_context(PageStore(self._storage))
            hosts = [
                opened.enter_context(HostPool(model.shape(), slots=L1_PAGES))
                for model in MODELS.values()
            ]
            self._planes = [_device_tensors(model) for model in MODELS.values()]
            layered = map(LayeredPool, hosts, self._planes)
            self._l1 = opened.enter_context(DevicePool(list(layered)))
            pools = [
                CachePool(space=_space(name), host=host, required=name == "kv")
                for name, host in zip(MODELS, hosts, strict=True)
            ]
            settings = ControllerSettings(
                prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
                partial_hits=PartialHits.TAKE_TARGET,
            )
            self._controller = opened.enter_context(
                CacheController(store, pools, settings)
            )
            self._opened = opened.pop_all()

    def read(self, document: Sequence[int]) -> list[int]:
        """Prefill with both models. Return the slots of the document's pages in L1."""
        slots = self._l1.allocate(len(document) // PAGE_TOKENS) or []
        for model, cache in zip(MODELS.values(), self._caches(slots), strict=True):
            model.extend(document, cache)
        return slots

    def evict(self, document: Sequence[int], slots: list[int]) -> None:
        """Move all pools from L1 to L2 and L3, and free L1."""
        reservation = self._controller.reserve(page_hashes(document, PAGE_TOKENS))
        self._l1.store(slots, reservation.slots).settled.result()
        self._controller.commit(reservation)
        self._l1.free(slots)
        self._controller.drain()

    def restore(
        self, document: Sequence[int], *, recompute_draft: bool = False
    ) -> tuple[list[int], LayerTransfer]:
        """Load the document from L3 to L2, and start its transfer to L1 by layers.

        With `recompute_draft` the draft model computes its missing pages, and the
        controller writes them to L3.
        """
        hashes = page_hashes(document, PAGE_TOKENS)
        lease = self._controller.prefetch("question", hashes).result()
        slots = self._l1.allocate(lease.pages) or []
        loading = self._l1.load(lease.slots, slots, indices=lease.indices)
        if recompute_draft and (claimed := lease.claim("draft")):
            DRAFT.extend(document, self._caches(slots, loading)[1])
            host_slots, pages = list(claimed.values()), list(claimed)
            self._l1.store(
                slots, [[], host_slots], indices=[[], pages]
            ).settled.result()
            lease.fill("draft", pages)
        loading.settled.add_done_callback(lambda _: lease.release())
        return slots, loading

    def lose_draft(self) -> None:
        """Delete the draft's pages in L3, as a store under pressure may."""
        for space in self._storage.spaces():
            if space.pool == "draft":
                self._storage.clear(space)

    def answer(
        self,
        prompt: Sequence[int],
        slots: list[int],
        loading: LayerTransfer | None = None,
        *,
        drafted_tokens: int = DRAFTED_TOKENS,
    ) -> Answer:
        """Continue `prompt` after the pages in `slots`, with drafted tokens."""
        pages = -(-(len(prompt) + ANSWER_TOKENS + 2 * drafted_tokens) // PAGE_TOKENS)
        own = self._l1.allocate(pages - len(slots)) or []
        target, draft = self._caches(slots + own, loading)
        target.tokens = draft.tokens = len(slots) * PAGE_TOKENS
        text, answer = list(prompt), Answer()
        while len(answer.tokens) < ANSWER_TOKENS:
            known = len(text)
            for _ in range(drafted_tokens):
                text.append(DRAFT.extend(text, draft)[-1])
            verified = TARGET.extend(text, target)[known - len(text) - 1 :]
            accepted = 0
            while (
                known + accepted < len(text)
                and text[known + accepted] == verified[accepted]
            ):
                accepted += 1
            text[known:] = verified[: accepted + 1]
            for cache in (target, draft):  # drop the rejected tokens
                cache.tokens = min(cache.tokens, known + accepted)
            answer.tokens += verified[: accepted + 1]
            answer.steps.append(accepted + 1)
        self._l1.free(own)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def _caches(
        self, slots: list[int], loading: LayerTransfer | None = None
    ) -> list[Cache]:
        rows = (
            torch.tensor(slots)[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)
        ).flatten()
        return [
            Cache(planes, rows, n, loading) for n, planes in enumerate(self._planes)
        ]


def _device_tensors(model: Transformer) -> list[list[torch.Tensor]]:
    """Return K and V, one tensor per layer. In a real engine they are on its GPU."""
    rows = (L1_PAGES * PAGE_TOKENS, HEADS, model.head_dim)
    return [[torch.zeros(rows) for _ in range(model.layers)] for _ in ("K", "V")]


def _space(name: str) -> KeySpace:
    shape = MODELS[name].shape()
    return KeySpace(
        model="example/copycat",
        dtype=shape.dtype,
        layout="page_first",
        page_tokens=PAGE_TOKENS,
        page_nbytes=shape.nbytes,
        shard=Shard(layers=(0, shape.layers), heads=(0, HEADS)),
        pool=name,
    )


def compare() -> dict[str, Answer]:
    """Answer the same question in every state of the cache."""
    document = random.Random(3).choices(
        range(VOCABULARY), k=DOCUMENT_PAGES * PAGE_TOKENS
    )
    prompt = (
        document + document[100:104]
    )  # the question is how a passage of the document continues
    answers: dict[str, Answer] = {}
    with tempfile.TemporaryDirectory() as directory:

        def restored(*, recompute_draft: bool = False) -> Answer:
            with Engine(directory) as engine:
                slots, loading = engine.restore(
                    document, recompute_draft=recompute_draft
                )
                return engine.answer(prompt, slots, loading)

        with Engine(directory) as engine:
            slots = engine.read(document)
            answers["target alone"] = engine.answer(prompt, slots, drafted_tokens=0)
            answers["never evicted"] = engine.answer(prompt, slots)
            engine.evict(document, slots)
        answers["restored, target and draft"] = restored()
        with Engine(directory) as engine:
            engine.lose_draft()
        answers["restored, target only"] = restored()
        answers["draft computed again"] = restored(recompute_draft=True)
        answers["restored after that"] = restored()
    return answers


if __name__ == "__main__":
    torch.set_num_threads(1)  # small models are faster on one thread
    answers = compare()
    alone = answers["target alone"].tokens
    for name, answer in answers.items():
        same = "the target's own" if answer.tokens[:ANSWER_TOKENS] == alone else "WRONG"
        print(
            f"{name:<26}  acceptance length {answer.acceptance_length:.2f},"
            f" answer: {same}"
        )
