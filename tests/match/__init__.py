"""The match stage."""
