"""W8A8 and bf16 products beside their peers."""
