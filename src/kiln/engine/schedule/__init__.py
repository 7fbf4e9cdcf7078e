"""What each engine step computes: queues, turns, KV cells, prefixes, and the decisions over them."""
