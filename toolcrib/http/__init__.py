"""Connections to the port: HTTP/1.1, the client's address and cross-origin requests."""
