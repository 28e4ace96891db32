"""Reads captured graphs and failed captures: nodes, allocations, diagnosis."""
