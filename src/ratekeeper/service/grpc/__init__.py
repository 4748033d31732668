"""gRPC: the servers, and the methods that every server has. Nothing here knows rate limits."""
