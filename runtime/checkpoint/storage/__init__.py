"""How linear modules are stored: what the weight formats have in common."""
