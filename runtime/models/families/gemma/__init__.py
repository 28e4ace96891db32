"""The text models of Gemma 1, 2 and 3."""
