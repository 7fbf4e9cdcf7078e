"""kiln: a server for open reasoning models with budgeted, observable thinking."""

__version__ = "0.1.0"
