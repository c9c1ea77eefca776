"""SwapMoE: a fixed number of virtual experts per layer; important ones are swapped in, nothing ever blocks."""
