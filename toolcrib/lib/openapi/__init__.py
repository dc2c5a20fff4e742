"""OpenAPI document of the REST API: operation ids, descriptions and error codes."""
