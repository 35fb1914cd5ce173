"""The benchmarks as modules. They come last: some have the name of an installed package."""

from __future__ import annotations

import sys

from servers import ROOT

sys.path.append(str(ROOT / "benchmarks"))
