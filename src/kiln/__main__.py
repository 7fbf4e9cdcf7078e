"""`python -m kiln` is the `kiln` command."""

from kiln.cli.main import app

app(prog_name="kiln")
