"""The graph manager: capture, replay, bursts."""
