"""Adapters of vLLM's secondary tiers."""
