"""A decode step of a whole model."""
