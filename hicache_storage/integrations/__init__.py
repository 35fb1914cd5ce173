"""Adapters that put a storage under an engine, one package for each engine.

Each one imports its engine lazily, and works on the page store.
"""
