"""The C kernel as Python sees it; tests/parity/ holds its answers to the reference."""
