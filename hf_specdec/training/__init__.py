"""Training of drafters: data, answers of the target, features, the trainer."""
