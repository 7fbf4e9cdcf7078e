"""Values that every room may name. Imports nothing of kiln."""
