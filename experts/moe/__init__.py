"""Language models: mixtures of experts whose experts stay in the file until they are wanted."""
