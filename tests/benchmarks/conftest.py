"""Makes the benchmarks importable, last on the path: some have the name of an installed package."""

from __future__ import annotations

import sys

from servers import ROOT

sys.path.append(str(ROOT / "benchmarks"))
