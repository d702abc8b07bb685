"""Dense and sink + sliding-window flash attention, forward and backward."""
