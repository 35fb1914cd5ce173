"""`python -m hicache_storage.cli`, which does the same as `hicache`."""

import sys

from hicache_storage.cli import main

if __name__ == "__main__":
    sys.exit(main())
