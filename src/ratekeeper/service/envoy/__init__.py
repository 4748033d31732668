"""The gRPC service for Envoy: descriptors become requests, and decisions become replies."""
