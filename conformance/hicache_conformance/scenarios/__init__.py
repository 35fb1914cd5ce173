"""Situations that the checks of several rules bring a store into."""
