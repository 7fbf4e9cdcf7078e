"""Choosing tokens: the sampler and what has a say beside it, drafts of tokens, scores of tokens given."""
