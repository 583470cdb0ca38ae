"""Load a pipeline of diffusers by name, make a request of it, and run it: whole, or step by step."""
