"""KV events: messages about the pages that a storage has gained and lost. Needs the extra `events`.

docs/events.md is the guide. `hicache_storage.observers.open_observers` imports the publisher where a
configuration asks for it.
"""
