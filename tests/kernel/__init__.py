"""The table in plain C, driven from C: under sanitizers, and killed at every instruction."""
