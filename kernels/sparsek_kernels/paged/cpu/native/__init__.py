"""Decoding, and sketches of new keys, in C; ``build`` compiles both into one library."""
