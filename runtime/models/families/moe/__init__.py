"""Families with mixtures of experts: one file each, over the layer of `mixture.py`."""
