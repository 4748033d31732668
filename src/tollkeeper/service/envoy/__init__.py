"""Envoy asks over gRPC: which descriptors are which request, and what it is answered."""
