"""DuoServe-MoE: predicts the experts of the next layer and fetches them while this one computes."""
