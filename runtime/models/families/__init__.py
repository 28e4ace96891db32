"""One file per model family; `registry.py` finds them by itself."""
