"""Benchmarks. Every figure is a ratio or a distribution from one run; none is a test."""
