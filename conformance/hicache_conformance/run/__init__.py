"""One run of the kit: from a subject and options to a tested record."""
