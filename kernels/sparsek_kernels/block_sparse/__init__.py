"""Attention over the blocks of a block-sparse (BSR) pattern, forward and backward."""
