"""Replay: a trace of requests runs through a controller and a storage, and every byte is verified.

This is the library behind `hicache replay`. It takes the engine's part. It prefetches the prefix of each
prompt, makes up the pages that are missing, as an engine would compute them, and commits them.
"""
