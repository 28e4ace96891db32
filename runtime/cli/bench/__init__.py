"""`python -m ostinato bench`: one file a benchmark."""
