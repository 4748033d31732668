"""The values that every other package uses: errors, limits, requests, decisions, time."""
