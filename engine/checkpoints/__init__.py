"""Checkpoints: where a model's weights, shape and tokenizer come from. One file a format, one line in `find.open_checkpoint`."""
