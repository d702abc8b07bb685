"""Attention over a paged KV cache: write, select, attend.  Checks and dispatch only."""
