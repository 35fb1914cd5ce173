"""Checks of stores that consist of other stores."""
