"""The service, without its server: tokens, JSON, answers."""
