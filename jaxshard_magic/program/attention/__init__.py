"""Attention in a loss: recognised as it is written (`find`), and as one primitive (`fused`)."""
