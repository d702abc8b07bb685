"""Decoding, and records of new keys, in C; ``build`` compiles both into one library."""
