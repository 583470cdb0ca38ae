"""The only rooms that know a model library."""
