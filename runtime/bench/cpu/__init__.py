"""A real model on the CPU, beside transformers in the same run."""
