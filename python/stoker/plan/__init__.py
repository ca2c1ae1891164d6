"""`stoker plan`: what training a model will take, before there is a weight of it."""
