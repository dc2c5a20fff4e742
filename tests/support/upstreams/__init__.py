"""Real MCP servers for the tests: healthy ones written with the SDK, hostile ones by hand."""
