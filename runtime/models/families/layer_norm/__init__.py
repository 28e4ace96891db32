"""Families of decoders with layer norms."""
