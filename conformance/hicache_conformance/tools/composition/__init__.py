"""Stores for a composition to consist of, which a check controls."""
