"""Every engine makes the same decisions on the same trace, field by field."""
