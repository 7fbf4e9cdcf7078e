"""The use cases: render, budget, submit, assemble."""
