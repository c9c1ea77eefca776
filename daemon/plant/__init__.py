"""The hub of a plant. No line waits for it: lines write to its database themselves (daemon/consumers/plant)."""
