"""The console in a real Chromium, on a real service."""
