"""Text on its way in and out: chat templates and shielding, detokenizing, splitting spans, tool calls."""
