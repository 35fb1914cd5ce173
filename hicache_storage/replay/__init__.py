"""Replay: run a trace of requests through a controller and a storage, and verify every byte.

This is the library behind `hicache replay`. It takes the place of an engine: it prefetches the prefix of
each prompt, makes up the missing pages, which an engine would compute, and commits them.
"""
