"""Adapters of LMCache's stores."""
