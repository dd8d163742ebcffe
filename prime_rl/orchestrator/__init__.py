"""One run's orchestrator: rollouts from inference, rewards from environments, batches for the trainer. Torch-free."""
