"""Who may use the server: keys and sessions in force, limits of each key, cross-site requests."""
