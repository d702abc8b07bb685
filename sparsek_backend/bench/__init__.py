"""`sparsek bench`: kernel and serving benchmarks with correctness gates and committed results."""
