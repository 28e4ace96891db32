"""Compiled kernels, which `ostinato` finds below `libraries`. There is nothing to import."""
