"""DuoServe-MoE: a trained predictor names the experts of later layers, which are fetched while this one computes."""
