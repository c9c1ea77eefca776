"""BrownoutServe: under pressure, experts that matter little for a token are answered by a united expert."""
