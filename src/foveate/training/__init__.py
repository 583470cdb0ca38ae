"""Training: LoRA distillation of sparse attention, and pixel diffusion transformers from scratch."""
