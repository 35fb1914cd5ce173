"""Storms: processes share a store, and signals end them and its server."""
