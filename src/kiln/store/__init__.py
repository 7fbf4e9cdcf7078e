"""What outlives the process: one SQLite file."""
