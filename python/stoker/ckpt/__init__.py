"""`stoker ckpt`: the command over stoker.checkpoint."""
