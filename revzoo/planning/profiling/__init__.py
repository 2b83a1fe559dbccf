"""From a model and a batch to a `Profile`: the bytes, FLOPs and seconds of every unit in every mode."""
