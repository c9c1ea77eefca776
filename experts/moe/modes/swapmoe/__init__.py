"""SwapMoE: a fixed number of virtual experts for each layer; important ones are swapped in, and nothing ever blocks."""
