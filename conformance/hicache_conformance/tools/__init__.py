"""Tools of the checks: page contents, proxies, processes, observation. None of them knows a rule."""
