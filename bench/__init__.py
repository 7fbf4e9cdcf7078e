"""Benchmarks. Every figure is a ratio or a distribution from one run; none is a test."""

import os

# As kiln sets it for itself. libgomp reads it when it is loaded, and some benchmarks import llama.cpp
# themselves.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
