"""Values that every other package uses: errors, limits, requests, decisions, time."""
