"""``basp bench``: a training step, or one attention layer, of several contenders side by side."""
