"""The processes of the service: settings, startup, workers and shutdown."""
