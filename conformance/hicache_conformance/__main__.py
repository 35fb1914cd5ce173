"""`python -m hicache_conformance`."""

from __future__ import annotations

import sys

from hicache_conformance.cli import main

sys.exit(main())
