"""The HTTP surface described: the OpenAPI document by parts, its page, its agreement with the structs."""
