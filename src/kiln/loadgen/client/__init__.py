"""The client side: HTTP/1.1, server-sent events, and the trace that each request leaves."""
