"""The kit tested on stores whose verdict is known."""
