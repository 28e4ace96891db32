"""What quantising learns from a text: SmoothQuant's factors, and scales of a KV cache."""
