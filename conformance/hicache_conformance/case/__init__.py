"""The resources and assertions of one check."""
