"""Linear layers, and the norms, activations and quantisation around them."""
