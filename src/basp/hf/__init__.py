"""transformers models: ``prepare``, and the attention function that their layers then call."""

from basp.hf.probe import prepare

__all__ = ["prepare"]
