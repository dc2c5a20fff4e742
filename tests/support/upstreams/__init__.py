"""MCP servers for tests: well-behaved ones use the SDK, misbehaving ones write raw messages."""
