"""Measure what methods cost and save in a model, and choose a setting within a budget."""
