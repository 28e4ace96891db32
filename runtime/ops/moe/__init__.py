"""Mixture of experts: routing, grouped products and the sum over the experts of a token."""
