"""Mixtures of experts: routers, grouped products, and experts that all tokens share."""
