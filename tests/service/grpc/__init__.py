"""Tests of the gRPC servers."""
