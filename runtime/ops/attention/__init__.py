"""Attention over paged and packed keys, and what writes them."""
