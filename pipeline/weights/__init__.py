"""Weights: full tensors come in from the trainers, engines get them: by collective, by disk, or locally."""
