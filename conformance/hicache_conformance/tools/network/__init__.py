"""Endpoints in configs, and a proxy that makes a network fail."""
