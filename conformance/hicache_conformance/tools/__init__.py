"""What checks measure with: pages that name themselves, proxies, processes. None knows a rule."""
