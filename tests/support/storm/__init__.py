"""Storms: processes share a store, while signals end them and its server."""
