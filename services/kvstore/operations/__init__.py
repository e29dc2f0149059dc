"""What the kvstore does, over its ports."""
