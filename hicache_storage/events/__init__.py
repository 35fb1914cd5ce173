"""KV events: messages about pages that a storage has gained or lost. Needs the extra `events`.

See docs/events.md for the guide. `hicache_storage.observers.open_observers` imports the publisher if the
configuration asks for it.
"""
