"""SparseK: sparse attention for long-context serving and training."""

__version__ = "0.1.0"
