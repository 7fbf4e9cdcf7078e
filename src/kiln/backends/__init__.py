"""Concrete engines and runners behind the ports."""
