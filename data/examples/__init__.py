"""Examples: what content is turned into."""
