"""`stoker train`: trains a small language model on text, out of a store, under a memory cap."""
