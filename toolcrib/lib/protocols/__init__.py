"""Messages of ASGI and JSON-RPC."""
