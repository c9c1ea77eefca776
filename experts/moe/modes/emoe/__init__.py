"""eMoE: a predictor chooses the experts for several prompts at once, aware of each task's needs."""
