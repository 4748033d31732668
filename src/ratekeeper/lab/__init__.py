"""Trials without risk: simulations of a fleet."""
