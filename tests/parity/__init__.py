"""One truth, every engine: the same trace gives the same decisions, field for field."""
