"""Thinking budgets: how they resolve, how they are enforced at decode time, how they are reported."""
