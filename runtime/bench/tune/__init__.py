"""Choosing tiles by measurement."""
