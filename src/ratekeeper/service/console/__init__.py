"""The console: pages for operators at /console, which call the admin API."""
