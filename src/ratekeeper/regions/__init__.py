"""Regions: limits that several regions share, each with its own Redis and its own nodes."""
