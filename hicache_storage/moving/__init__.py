"""Moves of an engine's pages through a page store. The adapters for engines use it."""
