"""Page bytes that name themselves, and a diagnosis of wrong ones."""
