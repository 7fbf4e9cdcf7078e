"""The OpenAI-compatible profile: pure functions between its wire structs and core values."""
