"""`coserve doctor`: what is wrong on this PC, and what to do about it."""
