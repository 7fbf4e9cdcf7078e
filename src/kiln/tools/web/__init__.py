"""Tools that reach the web: search, and pages of the public internet."""
