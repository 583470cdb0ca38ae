"""Pure functions of tensors in plain PyTorch; this text is the definition that every kernel is held to."""
