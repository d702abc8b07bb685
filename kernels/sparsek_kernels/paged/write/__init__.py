"""Storing new keys and values in their pages."""
