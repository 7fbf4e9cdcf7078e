"""What is measured of exchanges and told of them: the latency ledger, observers, statistics."""
