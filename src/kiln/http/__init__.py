"""The HTTP surface: application, routes, server-sent events, errors, metrics."""
