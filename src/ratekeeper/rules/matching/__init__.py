"""Find the rules that apply to a request: patterns, lists and the compiled table."""
