"""Kernel libraries: which variants exist, compiling them, loading them, and what they may take.

`docs/workshop.md` shows how to work on a kernel.
"""
