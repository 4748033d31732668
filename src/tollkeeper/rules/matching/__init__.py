"""Which rules apply to a request: patterns, lists and the compiled table."""
