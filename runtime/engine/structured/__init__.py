"""Texts of a form: JSON schemas, grammars, patterns and choices."""
