"""KV-301 to KV-307: opening, closing, configs, networks, processes and limits of the system."""
