"""The `kiln` command: settings, the server, the terminal chat."""
