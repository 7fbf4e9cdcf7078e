"""The models of a server: what is served of each, and the places that they are loaded into."""
