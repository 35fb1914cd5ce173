"""The work of the verbs, without flags and without printing."""
