"""The routes, a module for each dialect or concern."""
