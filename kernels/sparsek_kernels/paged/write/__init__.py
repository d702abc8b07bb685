"""Storing new keys and values in their pages, with the key means of those that they touch."""
