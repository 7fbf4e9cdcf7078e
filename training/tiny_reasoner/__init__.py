"""Trains the bundled model from scratch. Not part of the wheel."""
