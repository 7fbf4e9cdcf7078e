"""A load generator for servers that speak the OpenAI-compatible streaming API."""
