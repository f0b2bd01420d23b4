"""``fp4.cached_attention``: an append, and attention over what the cache then holds."""
