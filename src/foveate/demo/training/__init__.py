"""How the built-in model and its recogniser were made."""
