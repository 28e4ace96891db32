"""Models of several towers, a file each: what their text tower is."""
