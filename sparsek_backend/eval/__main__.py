"""`python -m sparsek_backend.eval`: the same command as `sparsek eval`."""

from sparsek_backend.eval.cli import app

if __name__ == "__main__":
    app()
