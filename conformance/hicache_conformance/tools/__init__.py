"""Tools for the checks: page contents, proxies, processes, observation. None depends on a rule."""
