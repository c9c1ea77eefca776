"""The slot cache of a language model: slots within a byte budget, their ledger, the transfer of weights into a slot."""
