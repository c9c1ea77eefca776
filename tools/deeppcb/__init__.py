"""Real bare boards: a line trained and measured on DeepPCB (S. Tang and others, MIT licence) or data of its kind."""
