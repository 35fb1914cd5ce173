"""Page bytes that name their page, and a diagnosis of wrong bytes."""
