"""Training with emulated computation: a model's real tensors through a real store, and the time that none can beat."""
