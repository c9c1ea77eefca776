"""eMoE: predicts per prompt and loads for several prompts at once, aware of each task's needs."""
