"""Pure functions between wire types and core values, one module a dialect."""
