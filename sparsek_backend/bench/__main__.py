"""`python -m sparsek_backend.bench`: the same commands as `sparsek bench`."""

from sparsek_backend.bench.cli import app

if __name__ == "__main__":
    app()
