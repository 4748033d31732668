"""The Redis store, as far as it can be tested without a server."""
