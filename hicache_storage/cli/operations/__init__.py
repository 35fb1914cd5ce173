"""The work of the verbs. Nothing here reads flags or prints."""
