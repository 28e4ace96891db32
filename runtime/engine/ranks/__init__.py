"""An engine as one of several ranks: rank 0 is called, and the others do the same."""
