"""Messages of ASGI and JSON-RPC, and clients of Redis."""
