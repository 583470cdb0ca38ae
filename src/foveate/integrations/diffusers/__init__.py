"""Methods inside diffusers pipelines."""
