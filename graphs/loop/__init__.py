"""Bursts: several decode steps as one launch."""
