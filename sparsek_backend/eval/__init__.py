"""`sparsek eval`: what a user loses by attending less, measured on his own model."""
