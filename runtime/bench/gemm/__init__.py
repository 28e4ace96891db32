"""W8A8 products beside their peers."""
