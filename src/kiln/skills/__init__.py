"""Skills in the open Agent Skills format, and agents: files that an operator edits while the server runs."""
