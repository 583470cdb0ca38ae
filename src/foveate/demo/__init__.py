"""The model that Foveate brings along."""
