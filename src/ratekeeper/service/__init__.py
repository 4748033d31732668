"""The service: HTTP, the admin API, Envoy's gRPC protocol, and the processes that run them."""
