"""SeerAttention-R's ranking: learned gates (gates.py)."""
