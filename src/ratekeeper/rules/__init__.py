"""Stage 2: which limits a request has to pass. A document becomes an immutable table."""
