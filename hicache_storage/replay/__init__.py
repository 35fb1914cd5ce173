"""Replay: a trace of requests driven through a controller and a storage, every byte proved.

The library below `hicache replay`. It plays the engine's part: it asks for each prompt's prefix,
makes up the pages that are missing where an engine would compute them, and commits them.
"""
