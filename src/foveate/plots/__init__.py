"""Figures of token orders, tiles, attention, block tables and losses, as images."""
