"""Counters and histograms, and their export to Prometheus and OpenTelemetry."""
