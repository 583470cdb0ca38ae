"""Earlier methods to compare with: token merging, token downsampling, and other choices of rows to recompute."""
