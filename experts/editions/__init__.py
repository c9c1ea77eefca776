"""What is in force: editions, one immutable file each, the pointer to the one in force, and weights by their sha256."""
