"""Helpers that know no method and no model: caching, devices, files, timing."""
