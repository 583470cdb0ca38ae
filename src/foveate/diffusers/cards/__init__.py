"""The cards of the supported model families."""
