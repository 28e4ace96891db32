"""Attention of prompts beside its peers."""
