"""Stage 4, the ways in and the answers out: web applications, the service, the gateways."""
