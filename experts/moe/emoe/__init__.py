"""What eMoE knows beforehand: the predictor of experts, and which tasks are sensitive to wrong ones."""
