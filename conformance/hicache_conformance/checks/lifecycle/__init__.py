"""KV-301 to KV-308: opening, looking, closing, configs, networks, processes and system limits."""
