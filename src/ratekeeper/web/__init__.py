"""Stage 4: the parts that the integrations of web frameworks share."""
