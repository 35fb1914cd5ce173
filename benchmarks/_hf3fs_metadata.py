"""The metadata server that SGLang's 3FS backend needs for MLA, loaded from SGLang's wheel."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from _servers import servers

if TYPE_CHECKING:
    from collections.abc import Mapping

_CODE = """
import sys
import sglang_cpu
sglang_cpu.stand_in()
from sglang.srt.mem_cache.storage.hf3fs.mini_3fs_metadata_server import run_metadata_server
run_metadata_server("127.0.0.1", int(sys.argv[1]))
"""


class Hf3fsMetadata(servers.ServerProcess):
    """A process that stores in memory where each page is."""

    ready_limit_s = 120.0  # the process imports most of SGLang

    def command(self) -> list[str]:
        return [sys.executable, "-c", _CODE, str(self.port)]

    def environment(self) -> Mapping[str, str]:
        return {"PYTHONPATH": str(Path(servers.__file__).parent)}

    def answers(self) -> bool:
        socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        return True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"
