"""The slot cache of a language model: slots within a byte budget, its ledger, the way of an expert into a slot.

Which expert leaves is a pure policy's decision (experts/moe/policy).
"""
