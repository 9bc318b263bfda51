"""A filesystem for training checkpoints on zoned storage."""

__version__ = "0.1.0"
