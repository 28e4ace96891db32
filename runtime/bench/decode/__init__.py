"""Decode attention beside its peers."""
