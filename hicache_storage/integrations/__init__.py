"""One adapter an engine. Each imports its engine lazily, and sits on the page store."""
