"""From messages to a prompt, and from a text to a message."""
