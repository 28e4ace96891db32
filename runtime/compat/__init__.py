"""Functions with the signatures of other libraries, over our ops."""
