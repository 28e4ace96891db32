"""Ops over the ranks of a tensor-parallel group: sums, with a norm and quantisation after them."""
