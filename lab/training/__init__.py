"""Training of the built-in models from scratch."""
