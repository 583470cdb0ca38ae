"""LoRA distillation: a model teaches its sparse self. Runs that can be broken off and gone on with."""
