"""Commands that list and change what a server works with: adapters, agents, keys, memories, skills."""
