"""Timing of sums over ranks, alone and with the norm and the quantisation that follow."""
