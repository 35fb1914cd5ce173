"""Adapters that present stores of other engines as `HiCacheStorage`, so that the kit can judge them.

There is a folder for each engine and a module for each store. An adapter uses the keys and calls of
its engine, and passes on the fields of a key space that its engine would pass on. It adds no check,
lock or retry. The packages of a store are imported when it is opened, so the kit works without
them. vLLM is the exception: its import takes seconds, so it is imported with its adapter if it is
installed.
"""
