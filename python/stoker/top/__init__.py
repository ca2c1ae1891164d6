"""`stoker top`: the live view of a run."""
