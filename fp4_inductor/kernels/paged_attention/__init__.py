"""``fp4.paged_attention``: a decode step over a paged cache."""
