"""SGLang's own server on a CPU, over a store of this project, over SGLang's own `file`, or over none."""

from __future__ import annotations

import http.client
import json
import os
import re
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from servers import library_path, wait_until
from serving.answers import Answer
from serving.engine import ANSWER_LIMIT_S, ANSWER_TOKENS, EngineServer
from serving.models import TINY, Model, checkpoint

VERSION = "SGLang 0.5.23"
PAGE = 16
"""The tokens of a page."""
LAYOUTS = {"page_first_direct": "direct", "page_first": "kernel", "layer_first": "direct"}
"""The layouts of host memory, each with the I/O backend that SGLang wants for it."""
LAYOUT = "page_first_direct"
_PLATFORM = "native_cpu"
_ADMIN = "admin"
_SETTLE_LIMIT_S = 60.0
_LOOK_S = 0.5
_LINKER_LOOKS = 6
"""Our metrics are published each second."""
_IDLE_LIMIT_S = 60.0
_IN_SHM = re.compile(r"/dev/shm/\S+(?=$)", re.MULTILINE)

Attachment = tuple[str, dict[str, Any]]
"""What SGLang attaches: the name of its backend, and its extra config."""


def ours(
    backend: str, config: Mapping[str, Any], adapter: Mapping[str, Any] | None = None, **fields: Any
) -> Attachment:
    """Return the attachment of a backend of this project."""
    stored = {"backend_name": backend, "config": dict(config), "adapter": dict(adapter or {})}
    return "dynamic", {**stored, **fields}


def own_file(**fields: Any) -> Attachment:
    """Return the attachment of SGLang's own `file` backend, in the server's `own_directory`."""
    return "file", fields


class SGLangServer(EngineServer):
    """A server of one model. Without `attached` it has HiCache without a storage."""

    version = VERSION

    def __init__(
        self,
        directory: Path,
        attached: Attachment | None = None,
        *options: str,
        model: Model = TINY,
        tokens: int = 16384,
        ratio: float = 2.0,
        chunk: int = 4096,
        prefetch: str = "wait_complete",
        layout: str = LAYOUT,
        hierarchical: bool = True,
        own_directory: Path | None = None,
        variables: Mapping[str, str] | None = None,
        more_path: Sequence[Path] = (),
    ) -> None:
        """Set what the server will be started with.

        Args:
            directory: Where its log is.
            attached: The storage that it starts with.
            *options: Further flags.
            model: The model.
            tokens: How many tokens the device pool holds.
            ratio: The size of the host pool, in device pools.
            chunk: How many tokens of prompts one step computes at most.
            prefetch: SGLang's prefetch policy for the storage.
            layout: The layout of the host pool, of LAYOUTS.
            hierarchical: Whether there is a host pool. Without it there is no prefix cache either.
            own_directory: Where SGLang's own `file` backend has its pages.
            variables: Further variables of the environment.
            more_path: Directories of further modules.
        """
        super().__init__(directory)
        self.attached = attached
        self.options = options
        self.model = model
        self.tokens = tokens
        self.ratio = ratio
        self.chunk = chunk
        self.prefetch = prefetch
        self.layout = layout
        self.hierarchical = hierarchical
        self.own_directory = own_directory or directory / "own"
        self.variables = dict(variables or {})
        self.more_path = more_path
        self.accept_lengths: list[float] = []
        """With speculative decoding: how many tokens a step of each answer so far gave."""
        self.left_nbytes = 0
        """The bytes of shared memory that were still in /dev/shm when the server had ended last."""

    def command(self) -> list[str]:
        where = f"--host 127.0.0.1 --port {self.port} --device cpu --dtype float32"
        how = "--attention-backend torch_native --sampling-backend pytorch --grammar-backend none"
        what = f"--page-size {PAGE} --max-total-tokens {self.tokens} --context-length 8192"
        more = f"--chunked-prefill-size {self.chunk} --random-seed 1 --skip-server-warmup"
        shown = f"--enable-cache-report --enable-metrics --admin-api-key {_ADMIN}"
        served = [sys.executable, "-m", "serving.sglang.launch"]
        served += ["--model-path", str(checkpoint(self.model))]
        flags = f"{where} {how} {what} {more} {shown}".split()
        return [*served, *flags, *self.cache_flags(), *self.options]

    def cache_flags(self) -> list[str]:
        """Return the flags of what keeps KV beside the device pool."""
        cache = ["--disable-radix-cache"]
        if self.hierarchical:
            policy = f"--hicache-storage-prefetch-policy {self.prefetch}"
            cache = ["--enable-hierarchical-cache", *self.host_flags(), *policy.split()]
        if self.attached:
            backend, extra = self.attached
            cache += ["--hicache-storage-backend", backend]
            cache += ["--hicache-storage-backend-extra-config", json.dumps(extra)]
        return cache

    def host_flags(self) -> list[str]:
        """Return the flags of the host memory."""
        backend = LAYOUTS[self.layout]
        layout = f"--hicache-mem-layout {self.layout} --hicache-io-backend {backend}"
        return f"--hicache-ratio {self.ratio:g} {layout}".split()

    def environment(self) -> Mapping[str, str]:
        """Return offline settings, and where modules, the platform and Mooncake's libraries are."""
        path = [self._distribution(), *self.more_path, *filter(None, sys.path)]
        return {
            "PYTHONPATH": ":".join(map(str, path)),
            "PYTHONDONTWRITEBYTECODE": "",
            "SGLANG_PLATFORM": _PLATFORM,
            "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(self.own_directory),
            "HF_HUB_OFFLINE": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            **library_path(),
            **self.variables,
        }

    def _distribution(self) -> Path:
        """Write what makes SGLang find the platform of `device.py`."""
        place = self.directory / "distribution"
        information = place / "hicache_tests_device-0.dist-info"
        information.mkdir(parents=True, exist_ok=True)
        (information / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: hicache-tests-device\nVersion: 0\n"
        )
        (information / "entry_points.txt").write_text(
            f"[sglang.srt.platforms]\n{_PLATFORM} = serving.sglang.device:activate\n"
        )
        return place

    def ask(self, prompt: Sequence[int], tokens: int = ANSWER_TOKENS, **fields: Any) -> Answer:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        asked = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True}
        return self.stream("/generate", {**asked, **fields}, tokens)

    def read(self, part: Any, answer: Answer, now_s: float) -> None:
        """Take over a part of the stream: each has all tokens so far."""
        information: dict[str, Any] = part.get("meta_info", {})
        reason: dict[str, Any] = information.get("finish_reason") or {}
        if "error" in part or reason.get("type") == "abort":
            answer.error = str(part.get("error") or reason)[:300]
            return
        if part["output_ids"]:
            answer.first_token_s = answer.first_token_s or now_s
        rows: list[list[float | None]] = information.get("output_token_logprobs") or []
        answer.tokens = part["output_ids"]
        answer.logprobs = [row[0] for row in rows]
        answer.cached_tokens = information["cached_tokens"]
        if reason and "spec_accept_length" in information:
            self.accept_lengths.append(information["spec_accept_length"])

    def call(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        """Call the server as its administrator. Return the status and the text of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_LIMIT_S)
        headers = {"content-type": "application/json", "authorization": f"Bearer {_ADMIN}"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            reply = connection.getresponse()
            return reply.status, reply.read().decode()
        finally:
            connection.close()

    def flush(self) -> None:
        """Empty the device pool and the host pool. SGLang refuses that while anything is under way."""
        self._repeat("POST", "/flush_cache")

    def attach(self, attachment: Attachment, prefetch: str = "wait_complete") -> None:
        """Attach a storage in place of the one that is attached."""
        self.detach()
        status, text = self.try_attach(attachment, prefetch)
        assert status == http.HTTPStatus.OK, text

    def try_attach(
        self, attachment: Attachment, prefetch: str = "wait_complete"
    ) -> tuple[int, str]:
        """Return SGLang's answer to an attach."""
        backend, extra = attachment
        body = {
            "hicache_storage_backend": backend,
            "hicache_storage_backend_extra_config_json": json.dumps(extra),
            "hicache_storage_prefetch_policy": prefetch,
            "hicache_write_policy": "write_through",
        }
        return self.call("PUT", "/hicache/storage-backend", body)

    def detach(self) -> None:
        """Detach the storage. SGLang refuses that for a moment after the last answer."""
        self._repeat("DELETE", "/hicache/storage-backend")

    def end(self) -> float:
        """End the server by SIGTERM, and look which of its shared memory is left."""
        used = self._shared_memory()
        took_s = super().end()
        self.left_nbytes += _unlinked(used)
        return took_s

    def stop(self) -> None:
        """Kill the server and what it has started. Remove the shared memory that SGLang then leaves."""
        used = self._shared_memory()
        super().stop()
        self.left_nbytes = _unlinked(used)

    def total(self, name: str) -> float:
        """Return the sum of the samples of this name."""
        return sum(
            value
            for sample, value in self.metrics().items()
            if sample.partition("{")[0] == f"sglang:{name}"
        )

    def pages(self) -> dict[str, int]:
        """Return how many pages had each verdict, such as {"load:ok": 31, "save:ok": 62}."""
        found: dict[str, int] = {}
        for sample, value in self.metrics().items():
            if sample.startswith("hicache_pages_total{") and value:
                labels = dict(re.findall(r'(\w+)="([^"]*)"', sample))
                key = f"{labels['direction']}:{labels['verdict']}"
                found[key] = found.get(key, 0) + int(value)
        return found

    def loaded_tokens(self) -> float:
        return self.total("prefetched_tokens_total")

    def settle(self) -> None:
        """Wait until the same number of tokens has been written to the storage in two looks."""
        self._until_constant(lambda: self.total("backuped_tokens_total"), 2)

    def _until_constant(self, figure: Callable[[], float], looks: int) -> None:
        seen: list[float] = []

        def is_constant() -> bool:
            seen.append(figure())
            time.sleep(_LOOK_S)
            return len(seen) >= looks and len(set(seen[-looks:])) == 1

        wait_until(is_constant, _SETTLE_LIMIT_S)

    def _shared_memory(self) -> list[Path]:
        """Return the files in /dev/shm that the server's processes have mapped."""
        found: set[str] = set()
        if self._process is None:
            return []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.getsid(int(process.name)) == self.pid:
                    found.update(_IN_SHM.findall((process / "maps").read_text()))
        return sorted(map(Path, found))

    def _repeat(self, method: str, path: str) -> None:
        answers: list[tuple[int, str]] = []

        def is_done() -> bool:
            answers.append(self.call(method, path))
            return answers[-1][0] == http.HTTPStatus.OK

        try:
            wait_until(is_done, _IDLE_LIMIT_S)
        except TimeoutError:
            raise TimeoutError(f"{method} {path}: {answers[-1]}") from None


class LinkedServer(SGLangServer):
    """A server with our linker in place of HiCache, or with neither if nothing is attached.

    It has one store from its start to its end, so `attach` and `detach` start it again. With packed or
    separate drafts, `loaded_tokens` counts the pages of both models.
    """

    plug_point = "linker, "

    def cache_flags(self) -> list[str]:
        if not self.attached:
            return []
        linker = {"linker_extra_config": self.attached[1]}
        flag = "--unified-cache-external-linker"
        flags = ["--enable-unified-cache-external-linker", f"{flag}-backend", "dynamic"]
        return [*flags, f"{flag}-config", json.dumps(linker), *self.host_flags()]

    def attach(self, attachment: Attachment, prefetch: str = "wait_complete") -> None:
        self._start_over(attachment)

    def detach(self) -> None:
        if self.attached:
            self._start_over(None)

    def _start_over(self, attachment: Attachment | None) -> None:
        self.end()
        self.attached = attachment
        self.start()

    def loaded_tokens(self) -> float:
        return PAGE * self.pages().get("load:ok", 0)

    def settle(self) -> None:
        """Wait until the store has got no page for longer than our metrics may be late."""
        if self.attached:
            self._until_constant(self._saved_pages, _LINKER_LOOKS)

    def _saved_pages(self) -> float:
        return sum(count for name, count in self.pages().items() if name.startswith("save:"))


def _unlinked(paths: Sequence[Path]) -> int:
    """Unlink the files that are still there, and return the bytes that they had."""
    nbytes = 0
    for path in paths:
        with suppress(FileNotFoundError):
            nbytes += path.stat().st_size
            path.unlink()
    return nbytes


_shared: list[SGLangServer] = []


@contextmanager
def shared(server: SGLangServer) -> Generator[None]:
    """Let `alone` stop this server meanwhile."""
    _shared.append(server)
    try:
        yield
    finally:
        _shared.remove(server)


@contextmanager
def alone() -> Generator[None]:
    """Stop the processes of the shared server meanwhile: SGLang's scheduler spins if it is idle."""
    stopped = list(_shared)
    _shared.clear()  # so that an `alone` within this one does not resume them
    for server in stopped:
        server.pause()
    try:
        yield
    finally:
        for server in stopped:
            server.resume()
        _shared.extend(stopped)
