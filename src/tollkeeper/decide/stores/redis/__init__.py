"""Quotas in Redis or Valkey: one server, Sentinel or Cluster."""
