"""The engine in a process of its own: what crosses the socket, and who watches the child."""
