"""The native exchange: rounds of generation with server tools, skills and memory between them."""
