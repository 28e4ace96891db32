"""Which partition of the L2 cache holds which memory."""
