"""One running exchange: from deliveries to events, its choices side by side, its account."""
