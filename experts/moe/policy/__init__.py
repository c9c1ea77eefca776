"""Pure decisions of language models: no torch, no clock, no random numbers of their own."""
