"""Several real processes, or a real server: what one process alone cannot show."""
