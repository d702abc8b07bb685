"""SparseK: sparse attention for long-context serving and training."""

from sparsek_backend.transformers_hook import install

__version__ = "0.3.0"

install()
del install
