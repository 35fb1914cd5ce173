"""Move an engine's pages through a page store. The adapters for engines are built on this package."""
