"""DuoServe-MoE's predictor: its input, its network, its training, and the stream that it runs on."""
