"""What the first import of the adapter changes in its process."""

from __future__ import annotations

import os
import re
import subprocess
import sys

LINES = """
import logging
from importlib import metadata

version = metadata.version

def of_another_wheel(name):
    if name == "vllm":
        raise metadata.PackageNotFoundError(name)
    return version(name)

import vllm_cpu
vllm_cpu.stand_in()
metadata.version = of_another_wheel

from hicache_storage.integrations.vllm import HiCacheConnector

from vllm import logger
logger._configure_vllm_root_logger()  # a server does so later than it loads a connector
for name in ("hicache_storage.page_store", "hicache_backends.redis"):
    logging.getLogger(name).info("all is well")
    logging.getLogger(name).warning("the store hangs")
"""


def output_of(script: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["VLLM_CONFIGURE_LOGGING"] = "1"
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return run.stdout + run.stderr


def test_it_loads_under_a_wheel_of_another_name_and_logs_through_vllm() -> None:
    lines = output_of(LINES)

    form = r"pid=\d+\)(?:\x1b\S*)? {level} \d\d-\d\d \d\d:\d\d:\d\d .*{text}"
    assert len(re.findall(form.format(level="WARNING", text="the store hangs"), lines)) == 2
    assert len(re.findall(form.format(level="INFO", text="all is well"), lines)) == 2


def test_loggers_that_the_process_has_configured_stay() -> None:
    own = f"import logging\nlogging.basicConfig(format='own: %(message)s')\n{LINES}"

    assert output_of(own).count("own: the store hangs") == 2
