"""Stores: the URIs that name them, and what the memory store keeps inside."""
