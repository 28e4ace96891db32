"""A page for browsers at /: a chat with the model, and live figures of its engine.

Its files are served as they are: no build, nothing from other places, no inline script or style.
"""
