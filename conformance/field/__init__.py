"""Other people's stores as `HiCacheStorage`, so that the kit can be run on them.

A module a store. Each presents it as its own engine uses it: with that engine's keys, fed with the
fields of the key space as far as the engine would carry them, and with that engine's way to call it.
What the engine never passes on is not passed on; no check, lock or retry is added. The stores' own
packages are imported when one is opened, so the kit does without them.
"""
