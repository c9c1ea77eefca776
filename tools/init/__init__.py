"""`coserve init`: a line of one's own, out of five answers."""
