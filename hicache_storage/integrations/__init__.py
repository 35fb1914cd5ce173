"""Adapters that put a storage under an engine, one package for each engine.

An adapter imports its engine lazily, and moves pages through the page store.
"""
