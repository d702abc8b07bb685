"""`sparsek train-demo`: a small natively sparse transformer against its dense twin on recall."""
