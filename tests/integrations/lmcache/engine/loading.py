"""What the first import of the adapter changes in its process."""

from __future__ import annotations

import os
import re
import subprocess
import sys

LINES = """
import logging

from hicache_storage.integrations.lmcache import HiCacheL2Adapter

for name in ("hicache_storage.page_store", "hicache_backends.redis"):
    logging.getLogger(name).info("all is well")
    logging.getLogger(name).warning("the store hangs")
"""


def output_of(script: str) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "LMCACHE_LOG_LEVEL": "INFO",
    }
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return run.stdout + run.stderr


def test_lines_have_lmcaches_format() -> None:
    lines = output_of(LINES)

    form = r"\[\d+-\d\d-\d\d \d\d:\d\d:\d\d,\d+\] LMCache {level}:\S* {text}"
    assert len(re.findall(form.format(level="WARNING", text="the store hangs"), lines)) == 2
    assert len(re.findall(form.format(level="INFO", text="all is well"), lines)) == 2


def test_loggers_that_the_process_has_configured_stay() -> None:
    own = f"import logging\nlogging.basicConfig(format='own: %(message)s')\n{LINES}"

    assert output_of(own).count("own: the store hangs") == 2
