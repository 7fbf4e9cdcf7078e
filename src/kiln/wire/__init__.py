"""msgspec structs of the wire dialects, nothing else."""
