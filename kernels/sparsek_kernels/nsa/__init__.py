"""Native sparse attention: compression, selection, selected attention and gates."""
