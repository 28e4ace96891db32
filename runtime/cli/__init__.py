"""The commands of `python -m ostinato`, one file each; importing them imports no torch."""
