"""`python -m sparsek_backend`: the same commands as `sparsek`."""

from sparsek_backend.cli import app

if __name__ == "__main__":
    app()
