"""From a source to sequences: documents, token ids, tokens on disk, spans, and the batches of each step."""
