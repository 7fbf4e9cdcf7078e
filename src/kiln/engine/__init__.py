"""The batching engine: scheduler, decode loop, sampler, and the ports it meets the world through."""
