"""One file per weight format; `quantization.py` finds them by itself."""
