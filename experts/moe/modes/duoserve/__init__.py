"""DuoServe-MoE: a trained predictor names the experts of later layers, fetched while this one computes."""
