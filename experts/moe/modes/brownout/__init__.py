"""BrownoutServe: under load, the tokens of less busy experts are answered by united experts."""
